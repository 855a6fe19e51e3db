"""Load throughput: the layer loader beside plain sequential reads of the same files, in alternation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.bench.coldfiles import ColdFolder
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import check_least, dtype_named
from cacheblend_rag.lab.bench.shapes import random_model, shape_config
from cacheblend_rag.lab.bench.times import median_ratio, seconds_of
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import inspect_model
from cacheblend_rag.store import KVReader, open_store
from cacheblend_rag.tuning import Tuning

__all__ = ["LoadBench", "LoadRow", "LoadSetting"]

_READ_BYTES = 1 << 20
_PLAIN = "plain reads"
_LOADER = "loader"


@dataclass(frozen=True, slots=True)
class LoadSetting:
    """What is measured.

    Attributes
    ----------
    shape : str
        The model's shape (`cacheblend_rag.lab.bench.SHAPES`); its vocabulary and MLP are made small, which KV does not show.
    chunks, chunk_tokens : int
        So many chunks of so many tokens.
    threads : tuple of int
        Numbers of loader threads; 0 is the loader with the pipeline off.
    ahead : int
        Layers that the loader may be ahead.
    repeats : int
        Measured rounds; each runs every method once, with nothing in the page cache.
    dtype : str
        The dtype of the KV.
    folder : Path or None
        Where files are written for the time of the measurement; the system's folder for temporary files by default.
    """

    shape: str
    chunks: int = 6
    chunk_tokens: int = 512
    threads: tuple[int, ...] = (0, 1, 2, 4)
    ahead: int = Tuning().prefetch_layers
    repeats: int = 5
    dtype: str = "float32"
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "chunks", "chunk_tokens", "repeats", "ahead")
        dtype_named(self.dtype)
        if not self.threads or min(self.threads) < 0:
            raise ConfigError(f"threads={self.threads} must be numbers of threads; 0 is the loader without any")


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


class LoadBench:
    """A store of chunk files, and everything that is measured on it; a context manager that removes it.

    Parameters
    ----------
    setting : LoadSetting
        What is measured.

    Raises
    ------
    ConfigError
        If the shape is unknown.
    """

    def __init__(self, setting: LoadSetting) -> None:
        self.setting = setting
        shape = shape_config(setting.shape)
        # KV has the shape of the attention alone; all else is as small as it may be.
        shape.vocab_size, shape.intermediate_size = 512, 8
        shape.max_position_embeddings = max(shape.max_position_embeddings, setting.chunks * setting.chunk_tokens + 1)
        self._decoder = inspect_model(random_model(shape, device="cpu", dtype=dtype_named(setting.dtype)))
        self._disk = ColdFolder(setting.folder)
        # Nothing is kept in RAM: every run reads the files.
        self._store = open_store(self._disk.path, ram_bytes=0)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, shape.vocab_size, (setting.chunks, setting.chunk_tokens), generator=generator).tolist()
        self._keys = [f"{number:032x}" for number in range(setting.chunks)]
        for batch in Encoder(self._decoder, [0], batch_tokens=4096).encode([Target(tuple(each)) for each in ids]):
            for index, kv in batch:
                self._store.put(self._keys[index], kv)
        self._files = self._disk.files
        self.file_bytes = self._disk.file_bytes
        tokens = setting.chunk_tokens
        prompt = (0, *(token for chunk in ids for token in chunk), 0)
        self._layout = PromptLayout(
            token_ids=prompt,
            positions=tuple(range(len(prompt))),
            chunks=tuple(ChunkSpan(start, start + tokens, start) for start in range(1, len(prompt) - 1, tokens)),
        )

    def cached_share_after_drop(self) -> float | None:
        """Empty the page cache of the files and return what share of them is in it even so; None where that cannot be told."""
        return self._disk.cached_share_after_drop()

    def __enter__(self) -> LoadBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()
        self._disk.remove()

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[LoadRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of LoadRow
            One for each method, plain reads first.
        """
        methods: list[int | None] = [None, *dict.fromkeys(self.setting.threads)]
        times = in_rounds(methods, self._timed, self.setting.repeats, progress=progress)
        return [self._row(method, times[method], times[None]) for method in methods]

    def _timed(self, method: int | None) -> float:
        self._disk.drop_cached()
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
                raise ConfigError(f"the files in {self._disk.path} were removed while they were measured")
            readers.append(reader)
        with LayerLoader(
            self._decoder, self._layout, readers, 0, len(self._layout), self.setting.ahead, threads
        ) as loader:
            for layer in range(self._decoder.num_kv_layers):
                loader.synchronize(layer)

    def _row(self, method: int | None, times: list[float], plain: list[float]) -> LoadRow:
        return LoadRow(
            method=_PLAIN if method is None else _LOADER,
            threads=method,
            seconds=median(times),
            seconds_min=min(times),
            seconds_max=max(times),
            bytes_per_s=self.file_bytes / median(times),
            of_plain_reads=median_ratio(plain, times),
        )
