"""Answers that are decoded together: each has a sequence of llama.cpp, and a step computes a token of every one."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cacheblend_gguf.llama import Llama
from cacheblend_rag.chat.seeded import SeededSampling
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.store import KVReader

__all__ = ["Answering", "Decoding", "processors"]

Scores = np.ndarray[tuple[int], np.dtype[np.float32]]

_LIMITS = ("top_k", "top_p", "min_p")
_DRAWING = ("do_sample", "seed", "temperature", *_LIMITS)
_OTHERS = ("logits_processor", "stopping_criteria", "stop_strings", "eos_token_id")


def processors(options: dict[str, Any]) -> list[Any]:
    """Return what changes the scores of an answer's next token, of which the greatest is chosen then.

    `ConfigError` for options of transformers' ``generate`` that are not offered here.
    """
    for name in options.keys() - {*_DRAWING, *_OTHERS}:
        raise ConfigError(
            f"{name}={options[name]!r:.60} is an option of transformers, not of this engine; it takes "
            f"{', '.join((*_DRAWING, *_OTHERS))}"
        )
    found = list(options.get("logits_processor", ()))
    if options.get("do_sample") and options.get("temperature") != 0:
        seed = options.get("seed", secrets.randbits(31))
        limits = {name: options[name] for name in _LIMITS if name in options}
        found.append(SeededSampling(seed, options.get("temperature", 1.0), **limits))
    return found


@dataclass(slots=True, eq=False)
class Answering:
    """An answer on its way: its prompt, what is stored of it by rows, and what ends it."""

    request: Request
    # Of each run of stored rows, by the row that it begins at.
    readers: dict[int, KVReader]
    limit: int
    end_ids: frozenset[int]
    processors: list[Any]
    criteria: list[Any]
    sequence: int = -1
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: Future[None] = field(default_factory=Future)

    @property
    def cells(self) -> int:
        """Cells that the prompt and the answer take at most."""
        return len(self.request.prompt.layout) + self.limit

    def choose(self, scores: Scores) -> bool:
        """Choose the next token by its scores, ``(vocab,)``; return whether it is the last one."""
        request = self.request
        ids = None
        if self.processors or self.criteria:
            ids = torch.tensor([[*request.prompt.layout.token_ids, *self.output]])
        if self.processors:
            given = torch.from_numpy(scores)[None]
            for each in self.processors:
                given = each(ids, given)
            token = int(given.argmax())
        else:
            token = int(scores.argmax())
        self.output.append(token)
        self.times.append(time.perf_counter())
        if request.streamer is not None:
            request.streamer.put(torch.tensor([token]))
        ended = token in self.end_ids or len(self.output) >= self.limit or request.stop.is_set()
        if self.criteria:
            assert ids is not None
            own = torch.cat([ids, torch.tensor([[token]])], dim=1)
            # A list, since each may have to see every token.
            ended = any([bool(each(own, None)) for each in self.criteria]) or ended
        return ended


class Decoding:
    """Decodes the answers of all callers together, in a thread of its own that ends when there are none."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self._changed = threading.Condition()
        self._waiting: deque[Answering] = deque()
        self._active: list[Answering] = []
        self._thread: threading.Thread | None = None

    def answer(self, answering: Answering) -> None:
        """Decode an answer and return at its end.

        Raises
        ------
        ChunkReadError
            If stored KV turns out damaged, before anything is generated.
        """
        with self._changed:
            self._waiting.append(answering)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cacheblend-gguf", daemon=True)
                self._thread.start()
        answering.done.result()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._active:
                    self._thread = None
                    return
            with self._llama.scheduler:
                self._admit()
                if self._active:
                    self._step()

    def _admit(self) -> None:
        """Begin with those that wait, in their order, as far as there are cells for them; one, where answers are under way."""
        while self._waiting:
            sequence = self._llama.begin(self._waiting[0].cells)
            if sequence is None:
                return
            with self._changed:
                answering = self._waiting.popleft()
                answering.sequence = sequence
                self._active.append(answering)
            self._attempt(answering, self._prefill)
            if len(self._active) > 1:
                return

    def _prefill(self, answering: Answering) -> bool:
        """Put the stored rows of a prompt into its sequence, compute the others, and choose the first token."""
        request, layout = answering.request, answering.request.prompt.layout
        if request.is_given_up:
            raise CacheBlendError("the answer was cancelled before it began; try again")
        request.queue_s += max(time.perf_counter() - request.ready - request.encode_s - request.open_s, 0.0)
        request.forward_started = time.perf_counter()
        row, scores = 0, np.empty(0, np.float32)
        for begin in [*sorted(answering.readers), len(layout)]:
            ids = layout.token_ids[row:begin]
            if begin < len(layout):
                self._llama.decode(ids, row, answering.sequence)
            else:
                self._llama.decode(ids[:-1], row, answering.sequence)
                [scores] = self._llama.step([(ids[-1], begin - 1, answering.sequence, True)])
            row = begin
            if begin < len(layout):
                reader, loading = answering.readers[begin], time.perf_counter()
                layers = [reader.layer(index) for index in range(reader.num_layers)]
                reader.finish()
                self._llama.put(layers, reader.start, begin, answering.sequence)
                request.wait_s += time.perf_counter() - loading
                row += len(reader.token_ids)
        return answering.choose(scores)

    def _step(self) -> None:
        """Compute the next token of all answers under way."""
        active = list(self._active)
        asked = [
            (each.output[-1], len(each.request.prompt.layout) + len(each.output) - 1, each.sequence, True)
            for each in active
        ]
        try:
            found = self._llama.step(asked)
        except Exception as error:  # handed to all who wait
            for each in active:
                self._leave(each, error)
            return
        for each, scores in zip(active, found, strict=True):
            self._attempt(each, lambda answering, scores=scores: answering.choose(scores))

    def _attempt(self, answering: Answering, work: Any) -> None:
        """Do one answer's part; what goes wrong in it is that answer's alone."""
        try:
            if work(answering):
                if answering.request.streamer is not None:
                    answering.request.streamer.end()
                self._leave(answering)
        except Exception as error:  # handed to who asked for it
            self._leave(answering, error)

    def _leave(self, answering: Answering, error: Exception | None = None) -> None:
        self._llama.end(answering.sequence)
        with self._changed:
            self._active.remove(answering)
        if error is None:
            answering.done.set_result(None)
        else:
            answering.done.set_exception(error)
