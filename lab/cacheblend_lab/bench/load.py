"""Load throughput: the layer loader beside plain sequential reads of the same files, in alternation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from cacheblend_lab.bench.runner import RoundsBench, median_ratio, say_range, seconds_of
from cacheblend_lab.bench.settings import LoadSetting
from cacheblend_lab.bench.shapes import random_model, shape_config
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import inspect_model
from cacheblend_rag.store import KVReader, open_store

__all__ = ["LoadBench", "LoadRow"]

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "plain reads": each file from its beginning to its end, one after the other, into the same memory. "loader": every
        layer of all chunks read, checked, rotated and put together.
    threads : int or None
        Loader threads.
    seconds, seconds_min, seconds_max : float
        Median and extremes over the rounds.
    bytes_per_s : float
        Bytes of all files over `seconds`.
    of_plain_reads : float
        Throughput over that of the plain reads of the same round, the median of the rounds.
    """

    method: str
    threads: int | None
    seconds: float
    seconds_min: float
    seconds_max: float
    bytes_per_s: float
    of_plain_reads: float


class LoadBench(RoundsBench[LoadSetting, "int | None", float, LoadRow]):
    """A store of chunk files; a method is a number of loader threads, or None for plain reads."""

    def __init__(self, setting: LoadSetting) -> None:
        super().__init__(setting)
        shape = shape_config(setting.shape)
        # KV has the shape of the attention alone; all else is as small as it may be.
        shape.vocab_size, shape.intermediate_size = 512, 8
        shape.max_position_embeddings = max(shape.max_position_embeddings, setting.chunks * setting.chunk_tokens + 1)
        self._decoder = inspect_model(random_model(shape, device="cpu", dtype=getattr(torch, setting.dtype)))
        self._cold = self.use_disk(setting.folder)
        # Nothing is kept in RAM: every run reads the files.
        self._store = open_store(self._cold.path, ram_bytes=0)
        self.closing.callback(self._store.close)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, shape.vocab_size, (setting.chunks, setting.chunk_tokens), generator=generator).tolist()
        self._keys = [f"{number:032x}" for number in range(setting.chunks)]
        for batch in Encoder(self._decoder, [0], batch_tokens=4096).encode([Target(tuple(each)) for each in ids]):
            for index, kv in batch:
                self._store.put(self._keys[index], kv)
        self._files = self._cold.files
        self.file_bytes = self._cold.file_bytes
        tokens = setting.chunk_tokens
        prompt = (0, *(token for chunk in ids for token in chunk), 0)
        self._layout = PromptLayout(
            token_ids=prompt,
            positions=tuple(range(len(prompt))),
            chunks=tuple(ChunkSpan(start, start + tokens, start) for start in range(1, len(prompt) - 1, tokens)),
        )

    def methods(self) -> list[int | None]:
        return [None, *dict.fromkeys(self.setting.threads)]

    def run(self, method: int | None) -> float:
        self._cold.drop_cached()
        return seconds_of(self._read_plainly if method is None else partial(self._load, method))

    def _read_plainly(self) -> None:
        view = memoryview(bytearray(_READ_BYTES))
        for file in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                while os.readv(descriptor, [view]):
                    pass
            finally:
                os.close(descriptor)

    def _load(self, threads: int) -> None:
        readers: list[KVReader] = []
        for key in self._keys:
            reader = self._store.open(key)
            if reader is None:
                raise ConfigError(f"the files in {self._cold.path} were removed while they were measured")
            readers.append(reader)
        with LayerLoader(
            self._decoder, self._layout, readers, 0, len(self._layout), self.setting.ahead, threads
        ) as loader:
            for layer in range(self._decoder.num_kv_layers):
                loader.synchronize(layer)

    def row(self, method: int | None, runs: Mapping[int | None, Sequence[float]]) -> LoadRow:
        times = runs[method]
        return LoadRow(
            method="plain reads" if method is None else "loader",
            threads=method,
            seconds=median(times),
            seconds_min=min(times),
            seconds_max=max(times),
            bytes_per_s=self.file_bytes / median(times),
            of_plain_reads=median_ratio(runs[None], times),
        )

    def title(self, rows: Sequence[LoadRow]) -> str:
        asked = self.setting
        return (
            f"{asked.shape}, {asked.dtype}: {asked.chunks} files of {asked.chunk_tokens} tokens, {say_bytes(self.file_bytes)} in "
            f"all, median of {asked.repeats}"
        )

    def cells(self, row: LoadRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "threads": row.threads,
            "time": say_seconds(row.seconds),
            "range": say_range(row.seconds_min, row.seconds_max),
            "throughput": f"{say_bytes(row.bytes_per_s)}/s",
            "of plain reads": f"{row.of_plain_reads:.2f}x",
        }

    def about(self) -> dict[str, Any]:
        return {"model": f"random weights, {self.setting.shape}"}

    def shared(self) -> dict[str, Any]:
        return {"shape": self.setting.shape, "dtype": self.setting.dtype, "file_bytes": self.file_bytes}

    def facts(self) -> dict[str, Any]:
        return {"file_bytes": self.file_bytes, "cached_share_after_drop": self.cached_share_after_drop()}
