"""Answers computed together: each has a sequence of llama.cpp; a step reads rows of prompts beside the others' next tokens."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from cacheblend_rag.engine.backend import GLANCE_S
from cacheblend_rag.engine.decode import Outputs
from cacheblend_rag.engine.lookup import Lookup, Pace, is_clear
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.seeded import SeededSampling
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ChunkReadError, ConfigError
from cacheblend_rag.store import KVReader

if TYPE_CHECKING:
    from cacheblend_gguf.llama import Llama

__all__ = ["ROWS", "Answering", "Decoding", "processors"]

Scores = np.ndarray[tuple[int], np.dtype[np.float32]]

_LIMITS = ("top_k", "top_p", "min_p")
_DRAWING = ("do_sample", "seed", "temperature", *_LIMITS)
# Options that are what a processor of transformers is made of, in the order in which it applies them.
_PROCESSORS: dict[str, Any] = {
    "sequence_bias": SequenceBiasLogitsProcessor,
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
    "suppress_tokens": SuppressTokensLogitsProcessor,
    "prefix_allowed_tokens_fn": partial(PrefixConstrainedLogitsProcessor, num_beams=1),
}
_OTHERS = (*_PROCESSORS, "logits_processor", "stopping_criteria", "stop_strings", "eos_token_id")
# How far a score must be ahead: llama.cpp computes with 8 bits, and in another order where a step has more rows.
_CLEAR = 0.5
# Rows that a step computes at most, as many as llama.cpp takes at once, and where prompts are read while others decode.
ROWS, _ROWS_BESIDE = 512, 128
# Seconds that a call waits at least: the thread takes its time to begin, even where nobody else asks.
_LEAST_S = 0.05


def processors(options: dict[str, Any]) -> list[Any]:
    """Return what changes the scores of an answer's next token, of which the greatest is chosen then.

    `ConfigError` for options of transformers' ``generate`` that are not offered here, and for invalid values.
    """
    for name in options.keys() - {*_DRAWING, *_OTHERS}:
        raise ConfigError(
            f"{name}={options[name]!r:.60} is an option of transformers, not of this engine; it takes "
            f"{', '.join((*_DRAWING, *_OTHERS))}"
        )
    try:
        found = [make(options[name]) for name, make in _PROCESSORS.items() if options.get(name)]
        found += options.get("logits_processor", ())
        if options.get("do_sample") and options.get("temperature") != 0:
            seed = options.get("seed", secrets.randbits(31))
            limits = {name: options[name] for name in _LIMITS if name in options}
            found.append(SeededSampling(seed, options.get("temperature", 1.0), **limits))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"an option of decoding is invalid: {error}; correct it, or leave it out") from error
    return found


@dataclass(slots=True, eq=False)
class Answering:
    """A prompt on its way to its answer, or to the scores after its last tokens, and what is stored of it by rows."""

    request: Request
    # Of each run of stored rows, by the row that it begins at.
    readers: dict[int, KVReader]
    # What ends it; None where the scores after so many last tokens of the prompt are wanted instead.
    outputs: Outputs | None = None
    logits_to_keep: int = 1
    processors: list[Any] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    sequence: int = -1
    # The prompt's next row to be read, and how many are still to be computed.
    row: int = 0
    left: int = 0
    output: list[int] = field(default_factory=list)
    # What may come next, once the first token is there; and whether the next one is to be computed alone.
    lookup: Lookup | None = None
    is_doubtful: bool = False
    # Of the prompt and the answer, `(1, tokens)`.
    ids: torch.Tensor = field(init=False)
    # Cancelled by who waits no longer, as long as it has not begun.
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        ids = self.request.prompt.layout.token_ids
        self.ids = torch.empty(1, len(ids) + self.limit, dtype=torch.int64)
        self.ids[0, : len(ids)] = torch.tensor(ids)

    @property
    def limit(self) -> int:
        """Most tokens of the answer."""
        return 0 if self.outputs is None else self.outputs.limit

    @property
    def ratio(self) -> float | None:
        """Which share of its chunks is recomputed; None where all is computed as text."""
        return None if self.request.state.selection is None else self.request.blend.recompute_ratio

    def shared(self) -> tuple[int | None, int]:
        """Return the sequence of an earlier prompt that this one begins like, and how many rows, if there is one."""
        request, head = self.request, self.request.prompt.head
        if not request.shares or not request.blend.enabled:
            return None, 0
        found = request.supply.prefixes.find(request.prompt, self.ratio, 0 if head is None else head.rows)
        return (None, 0) if found is None else (found[0].kv, found[1])

    @property
    def first_wanted(self) -> int:
        """The first row whose scores are wanted."""
        return len(self.request.prompt.layout) - self.logits_to_keep

    def begin(self, sequence: int, rows: int) -> None:
        """Begin in a sequence that holds so many first rows, which are those of an earlier prompt."""
        self.sequence = sequence
        if rows:
            self.request.resume(rows, whole=self.ratio is None)
            self.request.state.figures["head_tokens"] = 0
        self.row = self.request.layout.resumed_rows - self.request.state.head_rows
        self.readers = {row: reader for row, reader in self.readers.items() if self.row <= row < self.first_wanted}
        stored = (min(len(reader.token_ids), self.first_wanted - row) for row, reader in self.readers.items())
        self.left = len(self.request.prompt.layout) - min(self.row, self.first_wanted) - sum(stored)

    def choose(self, scores: Scores) -> bool:
        """Choose the next token by its scores, ``(vocab,)``; return whether it is the last one."""
        assert self.outputs is not None
        length = len(self.request.prompt.layout) + len(self.output)
        given = torch.from_numpy(scores)[None]
        for each in self.processors:
            given = each(self.ids[:, :length], given)
        token = int(given.argmax())
        self.output.append(token)
        self.ids[0, length] = token
        if self.lookup is not None:
            self.lookup.add(token)
        is_last = bool(self.outputs(self.ids[:, : length + 1], None))
        if (error := self.outputs.rows[0].error) is not None:
            raise error
        return is_last


class Decoding:
    """Decodes the answers of all callers together, in a thread of its own that ends when there are none."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.pace = Pace()
        self._lock = threading.Lock()
        self._waiting: deque[Answering] = deque()
        self._active: list[Answering] = []
        self._thread: threading.Thread | None = None

    def answer(self, answering: Answering) -> None:
        """Decode an answer and return at its end; `ChunkReadError` before it begins if stored KV turns out damaged."""
        request, done = answering.request, answering.done
        until = max(request.deadline, time.perf_counter() + _LEAST_S)
        with self._lock:
            self._waiting.append(answering)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cacheblend-gguf", daemon=True)
                self._thread.start()
        while not (done.running() or done.done()):
            left_s = until - time.perf_counter()
            if (left_s <= 0 or request.is_given_up) and done.cancel():
                if request.is_given_up:
                    raise CacheBlendError("the answer was cancelled before it began; try again")
                raise AnswerTimeoutError(
                    "other answers had the model for all of the time that this one may wait, so it was given up; let it "
                    "wait longer, or make fewer calls at once"
                )
            wait([done], max(min(left_s, GLANCE_S), 0))
        done.result()

    def _run(self) -> None:
        try:
            self._decode()
        except BaseException as error:
            # Nobody may wait for a thread that is gone.
            with self._lock:
                self._thread, lost = None, [*self._waiting, *self._active]
                self._waiting.clear()
                self._active.clear()
            for answering in lost:
                if not answering.done.done():
                    answering.done.set_exception(error)
            raise

    def _decode(self) -> None:
        while True:
            with self._lock:
                if not self._waiting and not self._active:
                    self._thread = None
                    return
            with self._llama.scheduler:
                # Whoever leaves it ends the threads that compute, so it is left only for who waits.
                while True:
                    self._admit()
                    if not self._active:
                        break
                    self._step()
                    if self._llama.scheduler.queue:
                        break

    def _admit(self) -> None:
        """Begin with those that wait, in their order, as far as there are cells for them, and as one step reads."""
        while self._waiting and sum(each.left for each in self._active) < _ROWS_BESIDE:
            answering = self._waiting[0]
            if not answering.done.cancelled():
                held, rows = answering.shared()
                sequence = self._llama.begin(len(answering.request.prompt.layout) + answering.limit, held, rows)
                if sequence is None:
                    return
                answering.begin(sequence, rows)
            self._waiting.popleft()
            if not answering.done.set_running_or_notify_cancel():
                if answering.sequence >= 0:
                    self._llama.end(answering.sequence)
                continue
            state = answering.request.state
            waited_s = time.perf_counter() - answering.request.ready - state.encode_s - state.open_s
            state.queue_s += max(waited_s, 0.0)
            state.forward_started = time.perf_counter()
            state.figures["load_bytes"] = 0
            self._active.append(answering)

    def _put_stored(self, answering: Answering) -> bool:
        """Put what is stored of a prompt's next rows into its sequence."""
        while answering.row in answering.readers:
            answering.row += self._put(answering, answering.row)
        if answering.row > answering.first_wanted:
            # What is stored reaches into the tokens whose scores are wanted.
            answering.row = answering.first_wanted
            self._llama.remove(answering.sequence, answering.row)
        return False

    def _put(self, answering: Answering, begin: int) -> int:
        """Put the stored rows that begin at a row of a prompt into its sequence; return how many there are."""
        request, reader, loading = answering.request, answering.readers[begin], time.perf_counter()
        layers = [reader.layer(index) for index in range(reader.num_layers)]
        reader.finish()
        try:
            self._llama.put(layers, reader.start, begin, answering.sequence)
        except ValueError as error:
            keys = [each.key for each in request.prompt.chunks if each.start <= begin < each.stop]
            if request.prompt.head is not None:
                keys.append(request.prompt.head.key)
            raise ChunkReadError(keys[0], str(error)) from error
        request.state.wait_s += time.perf_counter() - loading
        request.state.figures["load_bytes"] += len(reader.token_ids) * self._llama.row_bytes
        return len(reader.token_ids)

    def _step(self) -> None:
        """Compute the next token of all answers, of one alone what it may go on with too, and rows of prompts not read yet."""
        decoding = [each for each in self._active if not each.left]
        guesses = self._guess(decoding[0]) if decoding and len(self._active) == 1 else []
        parts: list[tuple[Answering, list[tuple[int, int, int, bool]]]] = []
        for each in decoding:
            row = len(each.request.prompt.layout) + len(each.output) - 1
            ids = (each.output[-1], *guesses)
            parts.append((each, [(id, row + number, each.sequence, True) for number, id in enumerate(ids)]))
        room = _ROWS_BESIDE - len(decoding) if decoding else ROWS
        for each in [each for each in self._active if each.left]:
            if room and self._attempt(each, self._put_stored):
                parts.append((each, self._read(each, room)))
                room -= len(parts[-1][1])
        if not parts:
            return
        for each, _ in parts:
            each.request.state.figures["batch_size"] = max(each.request.state.figures.get("batch_size", 1), len(parts))
        began = time.perf_counter()
        try:
            found = deque(self._llama.step([token for _, tokens in parts for token in tokens]))
        except Exception as error:  # handed to all who wait
            for each, _ in parts:
                self._leave(each, error)
            return
        if len(parts) == len(decoding) == 1:
            self.pace.note_step(1 + len(guesses), time.perf_counter() - began)
        for each, tokens in parts:
            own = [found.popleft() for *_, is_wanted in tokens if is_wanted]
            self._attempt(each, lambda answering, own=own: self._take(answering, guesses, own))

    def _read(self, answering: Answering, room: int) -> list[tuple[int, int, int, bool]]:
        """Return so many of a prompt's next rows as `Llama.step` takes them; those before the next stored ones at most."""
        ids, row = answering.request.prompt.layout.token_ids, answering.row
        stop = min([len(ids), row + room, *(begin for begin in answering.readers if begin > row)])
        answering.row, answering.left = stop, answering.left - (stop - row)
        return [(ids[each], each, answering.sequence, each >= answering.first_wanted) for each in range(row, stop)]

    def _guess(self, answering: Answering) -> list[int]:
        if answering.lookup is None:
            answering.lookup = Lookup(answering.ids[0, : len(answering.request.prompt.layout)].tolist(), self.pace)
            for token in answering.output:
                answering.lookup.add(token)
        is_doubtful, answering.is_doubtful = answering.is_doubtful, False
        return [] if is_doubtful else answering.lookup.guess(answering.limit - len(answering.output) - 1)

    def _take(self, answering: Answering, guesses: list[int], found: list[Scores]) -> bool:
        """Choose the next token, and those behind it as long as they are what was guessed; return whether the last was chosen."""
        if answering.outputs is None or not answering.output:
            # Of a prompt's last rows.
            answering.scores += found
            return not answering.left and (answering.outputs is None or answering.choose(found[-1]))
        try:
            for number, scores in enumerate(found):
                if guesses and not is_clear(torch.from_numpy(scores), _CLEAR):
                    answering.is_doubtful = True
                    return False
                if answering.choose(scores):
                    return True
                if answering.output[-1:] != guesses[number : number + 1]:
                    return False
        finally:
            if guesses:
                # What was read stays up to before the newest token.
                rows = len(answering.request.prompt.layout) + len(answering.output) - 1
                self._llama.remove(answering.sequence, rows)
        return False

    def _attempt(self, answering: Answering, work: Any) -> bool:
        """Do one answer's part, and return whether it goes on; what goes wrong in it is that answer's alone."""
        try:
            if not work(answering):
                return True
            if answering.outputs is not None:
                answering.outputs.finish([answering.output])
            self._leave(answering)
        except Exception as error:  # handed to who asked for it
            self._leave(answering, error)
        return False

    def _leave(self, answering: Answering, error: Exception | None = None) -> None:
        if error is not None or not self._keep(answering):
            self._llama.end(answering.sequence)
        self._active.remove(answering)
        if error is None:
            answering.done.set_result(None)
        else:
            answering.done.set_exception(error)

    def _keep(self, answering: Answering) -> bool:
        """Keep what an ended answer has read for the prompts to come; return whether it is kept."""
        request = answering.request
        if not answering.output or not request.shares or not request.blend.enabled:
            return False
        # Its last token was chosen, not read.
        rows = len(request.prompt.layout) + len(answering.output) - 1
        self._llama.keep(answering.sequence, rows)
        return request.supply.prefixes.keep(
            request.prompt, answering.output, answering.ratio, rows, answering.sequence, rows * self._llama.row_bytes
        )
