"""Adding chunks, against the model's own batched forward and encoding each chunk once, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from cacheblend_lab.bench.runner import Bench, Say, in_rounds, median_ratio, say_nothing, say_range, wait_for_device
from cacheblend_lab.bench.settings import NO_LIMIT, EncodeSetting
from cacheblend_lab.bench.shapes import RandomWords, make_model, text_of
from cacheblend_lab.bench.tiers import temporary_folder
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.encode import Encoder, Target, plan_batches
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.keys import chunk_key
from cacheblend_rag.model import inspect_model
from cacheblend_rag.store import open_store

__all__ = ["EncodeBench", "EncodeRow"]

_FORWARD, _ONCE = "forward", "once"


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "forward": the model's own forward with its own cache over each chunk once, in the same batches, prefix in every row.
        "once": each chunk encoded once, right behind the preamble, into RAM. "ram" and "disk": `BlendEngine.add`, which encodes
        each behind a companion as well, into RAM, and into a folder, where on return all is synced. "singly": the same, one by
        one, into RAM.
    tokens : int
        Tokens of the chunks, each once; prefix and padding do not count, nor what is read a second time.
    seconds, seconds_min, seconds_max : float
        Median and extremes over the rounds.
    tokens_per_s : float
        `tokens` over `seconds`.
    of_forward, of_once : float
        Median over the rounds of this method's time over that of "forward", and of "once", in the same round.
    cpu_s : float
        Median of the CPU time that all threads of the process took, which other processes disturb less.
    kv_bytes : int
        Bytes of KV that a run stores.
    bytes_of_once : float
        `kv_bytes` over those of "once".
    """

    method: str
    tokens: int
    seconds: float
    seconds_min: float
    seconds_max: float
    tokens_per_s: float
    of_forward: float
    of_once: float
    cpu_s: float
    kv_bytes: int
    bytes_of_once: float


class _Took(NamedTuple):
    seconds: float
    cpu_s: float
    kv_bytes: int


class EncodeBench(Bench[EncodeSetting, EncodeRow]):
    """A model of random weights and chunks of random tokens."""

    def __init__(self, setting: EncodeSetting) -> None:
        super().__init__(setting)
        self._model, self._tokenizer = make_model(setting)
        words = RandomWords(self._tokenizer, setting.seed)
        self._prefix = tuple(words.token_ids(setting.prefix_tokens))
        self._settings = setting.engine_settings(encode_batch_tokens=setting.batch_tokens, preamble=self._prefix)
        self._ids = [tuple(words.token_ids(setting.chunk_tokens)) for _ in range(setting.chunks)]
        self._chunks = []
        start = 0
        for number, text in enumerate(map(text_of, self._ids)):
            document = str(number // setting.document_chunks) if setting.document_chunks else None
            # Places are compared within a document only.
            self._chunks.append(Chunk(text, f"chunk {number}", document=document, start=start if document else None))
            start += len(text) + 1
        plan = plan_batches([setting.chunk_tokens] * setting.chunks, setting.prefix_tokens, setting.batch_tokens)
        rows = [[[*self._prefix, *self._ids[index]] for index in batch] for batch in plan]
        self._batches = [torch.tensor(batch, device=setting.device) for batch in rows]

    def measure(self, say: Say = say_nothing) -> list[EncodeRow]:
        methods: dict[str, Callable[[], _Took]] = {
            _FORWARD: partial(self._forward, self._batches),
            _ONCE: partial(self._once, self._ids),
            "ram": partial(self._add, [self._chunks], on_disk=False),
            "disk": partial(self._add, [self._chunks], on_disk=True),
            "singly": partial(self._add, [[chunk] for chunk in self._chunks], on_disk=False),
        }
        # One batch of each, or what begins one, warms up.
        few = self._batches[0].shape[0]
        self._forward(self._batches[:1])
        self._once(self._ids[:few])
        for on_disk in (False, True):
            self._add([self._chunks[:few]], on_disk=on_disk)
        runs = in_rounds(list(methods), lambda name: methods[name](), self.setting.repeats, unmeasured=0, say=say)
        return [self._row(name, runs) for name in runs]

    @torch.no_grad()
    def _forward(self, batches: Sequence[torch.Tensor]) -> _Took:
        with self._timed() as took:
            for ids in batches:
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return _Took(took[0], took[1], 0)

    def _once(self, chunks: Sequence[tuple[int, ...]]) -> _Took:
        encoder = Encoder(inspect_model(self._model), self._prefix, self.setting.batch_tokens)
        with closing(open_store(None, NO_LIMIT)) as store:
            with self._timed() as took:
                for batch in encoder.encode([Target(ids) for ids in chunks]):
                    for index, kv in batch:
                        store.put(chunk_key("", chunks[index]), kv)
            return _Took(took[0], took[1], store.stats().ram_bytes)

    def _add(self, calls: Sequence[Sequence[Chunk]], *, on_disk: bool) -> _Took:
        with temporary_folder(self.setting.folder) as folder:
            store = Path(folder) / "kv" if on_disk else None
            with BlendEngine(self._model, self._tokenizer, store=store, **self._settings) as engine:
                with self._timed() as took:
                    encoded = sum(engine.add(chunks).encoded for chunks in calls)
                assert encoded == sum(map(len, calls))
                return _Took(took[0], took[1], engine.store.stats().ram_bytes)

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        took: list[float] = []
        wait_for_device(self.setting.device)
        started, cpu_started = time.perf_counter(), time.process_time()
        yield took
        wait_for_device(self.setting.device)
        took += [time.perf_counter() - started, time.process_time() - cpu_started]

    def _row(self, method: str, runs: Mapping[str, Sequence[_Took]]) -> EncodeRow:
        times = {name: [run.seconds for run in each] for name, each in runs.items()}
        own, kv_bytes = times[method], runs[method][-1].kv_bytes
        tokens = self.setting.chunks * self.setting.chunk_tokens
        return EncodeRow(
            method=method,
            tokens=tokens,
            seconds=median(own),
            seconds_min=min(own),
            seconds_max=max(own),
            tokens_per_s=tokens / median(own),
            of_forward=median_ratio(own, times[_FORWARD]),
            of_once=median_ratio(own, times[_ONCE]),
            cpu_s=median(run.cpu_s for run in runs[method]),
            kv_bytes=kv_bytes,
            bytes_of_once=kv_bytes / runs[_ONCE][-1].kv_bytes,
        )

    def title(self, rows: Sequence[EncodeRow]) -> str:
        asked = self.setting
        inside = f", {asked.document_chunks} a document," if asked.document_chunks else ""
        return (
            f"{asked.label}: {asked.chunks} chunks of {asked.chunk_tokens} tokens{inside} after "
            f"a prefix of {asked.prefix_tokens}, in {len(self._batches)} batches, median of {asked.repeats}"
        )

    def cells(self, row: EncodeRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "of forward": f"{row.of_forward:.2f}x",
            "of once": f"{row.of_once:.2f}x",
            "time": say_seconds(row.seconds),
            "range": say_range(row.seconds_min, row.seconds_max),
            "CPU time": say_seconds(row.cpu_s),
            "KV": say_bytes(row.kv_bytes),
            "KV of once": f"{row.bytes_of_once:.2f}x",
        }
