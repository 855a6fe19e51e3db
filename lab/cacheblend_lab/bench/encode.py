"""Tokens per second of adding chunks, against the model's own batched forward, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from cacheblend_lab.bench.runner import Bench, Say, in_rounds, median_ratio, say_nothing, say_range, wait_for_device
from cacheblend_lab.bench.settings import EncodeSetting
from cacheblend_lab.bench.shapes import RandomWords, make_model, text_of
from cacheblend_lab.bench.tiers import temporary_folder
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.encode import plan_batches
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.reading import Member, Place, ReadingRules, contexts

__all__ = ["EncodeBench", "EncodeRow"]

_FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class EncodeRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "forward": the model's own forward with its own cache over the same ids in the same batches, prefix in every row; of
        documents over their text, each token once, in the windows that they are read in. "ram" and "disk": `BlendEngine.add` into
        RAM, and into a folder, where on return all is synced. "singly": chunks of documents added one by one, into RAM.
    tokens : int
        Tokens of the text; prefix and padding do not count, nor what is read a second time.
    batches : int
        Batches of a run.
    seconds, seconds_min, seconds_max : float
        Median and extremes over the rounds.
    tokens_per_s : float
        `tokens` over `seconds`.
    share : float
        Median over the rounds of the forward's time over this method's in the same round.
    cpu_s : float
        Median of the CPU time that all threads of the process took, which other processes disturb less.
    kv_bytes : int
        Bytes of KV that a run stores.
    """

    method: str
    tokens: int
    batches: int
    seconds: float
    seconds_min: float
    seconds_max: float
    tokens_per_s: float
    share: float
    cpu_s: float
    kv_bytes: int


class _Took(NamedTuple):
    seconds: float
    cpu_s: float


class EncodeBench(Bench[EncodeSetting, EncodeRow]):
    """A model of random weights and chunks of random tokens."""

    def __init__(self, setting: EncodeSetting) -> None:
        super().__init__(setting)
        self._model, self._tokenizer = make_model(setting)
        words = RandomWords(self._tokenizer, setting.seed)
        prefix = words.token_ids(setting.prefix_tokens)
        self._settings = setting.engine_settings(
            encode_batch_tokens=setting.batch_tokens,
            preamble=tuple(prefix),
            context_tokens=setting.context_tokens,
        )
        if setting.document_chunks:
            ids = self._make_documents(words)
        else:
            ids = [words.token_ids(setting.chunk_tokens) for _ in range(setting.chunks)]
            self._chunks = [Chunk(text_of(row), f"chunk {number}") for number, row in enumerate(ids)]
        self._tokens = self._count_tokens()
        plan = plan_batches([len(row) for row in ids], setting.prefix_tokens, setting.batch_tokens)
        # The windows of a document differ in length, and nothing is padded here.
        groups = [list(group) for batch in plan for _, group in groupby((ids[index] for index in batch), len)]
        self._batches = [torch.tensor([[*prefix, *row] for row in group], device=setting.device) for group in groups]
        self._kv_bytes = 0

    def _count_tokens(self) -> int:
        """Return the tokens of the text, each once."""
        setting = self.setting
        shared = setting.chunks - setting.chunks // setting.document_chunks if setting.document_chunks else 0
        return setting.chunks * setting.chunk_tokens - shared * setting.overlap

    def _make_documents(self, words: RandomWords) -> list[list[int]]:
        """Make the chunks of documents; return the tokens of each window, as they are read without knowing of chunks."""
        setting, rows = self.setting, []
        step = setting.chunk_tokens - setting.overlap
        size = step * (setting.document_chunks - 1) + setting.chunk_tokens
        self._chunks = []
        for number in range(setting.chunks // setting.document_chunks):
            ids = words.token_ids(size)
            members = []
            for place in range(setting.document_chunks):
                begin = place * step
                row = ids[begin : begin + setting.chunk_tokens]
                if setting.overlap and place:
                    row[0] ^= 1  # a word of the same length
                # Where words begin is counted in words here: all of them count as one character.
                at = Place(str(number), begin, None, len(row), "", tuple(range(1, len(row) + 1)))
                members.append(Member(f"{number}.{place}", tuple(row), at))
                start = len(text_of(ids[:begin])) + bool(begin)
                self._chunks.append(Chunk(text_of(row), f"{number}.{place}", document=str(number), start=start))
            # A window ends where the next one begins to be read.
            found = contexts(members, ReadingRules(setting.context_tokens))
            for place, context in enumerate(found):
                if place + 1 == len(found) or found[place + 1].first != context.first:
                    rows.append(ids[context.first * step : place * step + setting.chunk_tokens])
        return rows

    def measure(self, say: Say = say_nothing) -> list[EncodeRow]:
        methods: dict[str, Callable[[], _Took]] = {
            _FORWARD: partial(self._forward, self._batches),
            "ram": partial(self._add, self._chunks, on_disk=False),
            "disk": partial(self._add, self._chunks, on_disk=True),
        }
        if self.setting.document_chunks and self.setting.singly:
            methods["singly"] = self._add_singly
        # One batch of each, or what begins one, warms up.
        self._forward(self._batches[:1])
        for on_disk in (False, True):
            self._add(self._chunks[: self._batches[0].shape[0]], on_disk=on_disk)
        runs = in_rounds(list(methods), lambda name: methods[name](), self.setting.repeats, unmeasured=0, say=say)
        return [self._row(name, runs) for name in runs]

    @torch.no_grad()
    def _forward(self, batches: Sequence[torch.Tensor]) -> _Took:
        with self._timed() as took:
            for ids in batches:
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return took[0]

    def _add(self, chunks: Sequence[Chunk], *, on_disk: bool) -> _Took:
        with temporary_folder(self.setting.folder) as folder:
            store = Path(folder) / "kv" if on_disk else None
            with BlendEngine(self._model, self._tokenizer, store=store, **self._settings) as engine:
                with self._timed() as took:
                    result = engine.add(chunks)
                assert result.encoded == len(chunks)
                stats = engine.store.stats()
                self._kv_bytes = stats.ram_bytes
        return took[0]

    def _add_singly(self) -> _Took:
        with BlendEngine(self._model, self._tokenizer, **self._settings) as engine:
            with self._timed() as took:
                for chunk in self._chunks:
                    engine.add([chunk])
        return took[0]

    @contextmanager
    def _timed(self) -> Iterator[list[_Took]]:
        took: list[_Took] = []
        wait_for_device(self.setting.device)
        started, cpu_started = time.perf_counter(), time.process_time()
        yield took
        wait_for_device(self.setting.device)
        took.append(_Took(time.perf_counter() - started, time.process_time() - cpu_started))

    def _row(self, method: str, runs: Mapping[str, Sequence[_Took]]) -> EncodeRow:
        times = [run.seconds for run in runs[method]]
        return EncodeRow(
            method=method,
            tokens=self._tokens,
            batches=len(self._batches),
            seconds=median(times),
            seconds_min=min(times),
            seconds_max=max(times),
            tokens_per_s=self._tokens / median(times),
            share=median_ratio([run.seconds for run in runs[_FORWARD]], times),
            cpu_s=median(run.cpu_s for run in runs[method]),
            kv_bytes=0 if method == _FORWARD else self._kv_bytes,
        )

    def title(self, rows: Sequence[EncodeRow]) -> str:
        asked = self.setting
        inside = f", {asked.document_chunks} a document, {asked.overlap} shared," if asked.document_chunks else ""
        return (
            f"{asked.label}: {asked.chunks} chunks of {asked.chunk_tokens} tokens{inside} after "
            f"a prefix of {asked.prefix_tokens}, in {rows[0].batches} batches, median of {asked.repeats}"
        )

    def cells(self, row: EncodeRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "share": f"{row.share:.3f}",
            "time": say_seconds(row.seconds),
            "range": say_range(row.seconds_min, row.seconds_max),
            "CPU time": say_seconds(row.cpu_s),
            "KV": say_bytes(row.kv_bytes),
        }
