"""A model behind an engine: what is known of it, how prompts are computed, what takes part in that, and who has the model."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.encode import ChunkEncoder
from cacheblend_rag.engine.protocol import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.model import Decoder, ModelCard, unwrapped
from cacheblend_rag.prefixes import PrefixCache

__all__ = [
    "GLANCE_S",
    "Attachment",
    "Backend",
    "EncodingModel",
    "RunningForward",
    "Scheduler",
    "deadline_of",
    "end_workers",
    "engine_class",
    "scheduler_of",
]

logger = logging.getLogger(__name__)

_OMP_PAUSE_SOFT = 1
# Of GNU's OpenMP, by which torch computes on Linux.
_pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
GLANCE_S = 0.2
"""Seconds after which a call that waits looks whether its answer is still wanted."""


def end_workers() -> None:
    """End the threads that this thread's kernels are shared out to; the next kernel begins new ones."""
    # GNU's runtime lets workers wait awake only as long as there are no more of them than processors: where a second thread
    # has computed, every kernel waits for its workers to wake up, which makes models up to 1.6 times slower.
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_OMP_PAUSE_SOFT)


class Scheduler:
    """Lets one computation at a time have a model; threads have it in the order in which they came, and may take it again."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        # What stands in line for the model, the oldest first.
        self.queue: list[object] = []

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextmanager
    def after_others(self, patience_s: float | None = None) -> Iterator[None]:
        """Take the model when no other thread waits for it; after so many seconds stand in line as they do, if that is given."""
        with self._changed:
            is_free = self.is_mine or self._changed.wait_for(
                lambda: self._owner is None and not self.queue, timeout=patience_s
            )
            if is_free:
                self._owner = threading.get_ident()
                self._depth += 1
        if not is_free:
            self.take()
        try:
            yield
        finally:
            self.leave()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the model."""
        return self._owner == threading.get_ident()

    def take(
        self, place: object = None, deadline: float = math.inf, is_given_up: Callable[[], bool] | None = None
    ) -> bool:
        """Wait for the model and take it; return False if another thread picked `place` out of the line.

        `AnswerTimeoutError` after the `deadline`, by `time.perf_counter`, and `CacheBlendError` if it `is_given_up`.
        """
        place = object() if place is None else place
        with self._changed:
            if not self.is_mine:
                self.queue.append(place)
                try:
                    while self._owner is not None or self.queue[0] is not place:
                        left_s = deadline - time.perf_counter()
                        if left_s <= 0:
                            raise AnswerTimeoutError(
                                "the model was busy with other calls for as long as this one may wait; "
                                "let it wait longer, or make fewer calls at once"
                            )
                        self._changed.wait(min(left_s, threading.TIMEOUT_MAX if is_given_up is None else GLANCE_S))
                        if place not in self.queue:
                            return False
                        if is_given_up is not None and is_given_up():
                            raise CacheBlendError("the answer was cancelled before it began; try again")
                    self._owner = threading.get_ident()
                finally:
                    if place in self.queue:
                        self.queue.remove(place)
                        self._changed.notify_all()
            self._depth += 1
        return True

    def leave(self) -> None:
        """Let the next in line have the model, once this thread has left it as often as it took it."""
        if self._depth == 1:
            end_workers()
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    def pick(self, place: object) -> bool:
        """Take out of the line what another thread waits with; return whether it was still there."""
        with self._changed:
            if place not in self.queue:
                return False
            self.queue.remove(place)
            self._changed.notify_all()
            return True


def deadline_of(wait_s: float | None) -> float:
    """Return until when a call waits for the model that may wait so many seconds from now, None for as long as it takes."""
    if wait_s is None:
        return math.inf
    if not (isinstance(wait_s, int | float) and wait_s >= 0):
        raise ConfigError(f"wait_s={wait_s!r} must be a number of seconds from 0 upwards; leave it out for no limit")
    return time.perf_counter() + wait_s


_schedulers: WeakKeyDictionary[PreTrainedModel, Scheduler] = WeakKeyDictionary()


def scheduler_of(model: PreTrainedModel) -> Scheduler:
    """Return a model's scheduler: one for all engines that are made on it, and on what PEFT or torch.compile put around it."""
    # One call, which threads cannot get between.
    found = _schedulers.setdefault(unwrapped(model), Scheduler())
    if found.process != os.getpid():
        # Of a process that this one was forked from, whose threads may have had the model.
        found = _schedulers[unwrapped(model)] = Scheduler()
    return found


class EncodingModel(ABC):
    """A model as a library of chunks knows it, wherever it runs.

    Its parts are set by its constructor.
    """

    tokenizer: Any
    # Most tokens that it can read and write; None for any number.
    window: int | None
    # How a prompt beyond the window could be taken, where anything but a shorter one helps.
    window_hint: str = ""
    # Form of its KV, without transformers a ``ModelCard("", window, dtype, shapes, rotations)``; None where none is stored.
    form: Decoder | ModelCard | None
    num_kv_layers: int
    num_embeddings: int
    scheduler: Scheduler

    @abstractmethod
    def identity(self, *, private: bool) -> str:
        """Return a digest of weights and tokenizer; any unique one for a store that no other process sees."""

    @abstractmethod
    def encoder(self, preamble: tuple[int, ...]) -> ChunkEncoder | None:
        """Return what computes chunks' KV behind a preamble; None where KV is not stored."""

    def check_model(self) -> None:
        """Raise `ConfigError` if the model was changed since it was made."""
        return


class Backend(EncodingModel):
    """A model that engines ask; `BlendEngine` is given one in place of a model of transformers.

    For each request it fills in what `make_report` reads: in `Request.state` the `selection`, or why there is none
    (`fallback_reason`); `hits` and `reasons` of the chunks, by ``request.supply.readers(request)``, or ``note_held`` for a prompt
    that is computed in full; `recomputed` and `charge`, unless it is; `queue_s`, `forward_started`; and in `figures` what else
    `BlendReport` has. `tests/core/stub.py` is the least one.
    """

    name: str
    # Model of transformers, if it is one.
    model: Any = None
    # Why it has no form.
    reason: str | None = None
    num_layers: int
    # What all engines over the model keep of earlier prompts.
    shelf: WeakSet[PrefixCache]

    @property
    @abstractmethod
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @abstractmethod
    def check_blend(self, blend: BlendConfig) -> None:
        """Raise `ConfigError` if prompts cannot be blended so."""

    @abstractmethod
    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of decoding that say something; `ConfigError` for those that cannot be had."""

    @abstractmethod
    def cut(self, kv: Any, rows: int) -> Any:
        """Return the first rows of the KV of an earlier prompt; with 0 it is let go."""

    @abstractmethod
    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        """Answer prompts of one engine whose options differ in objects only, at most `batch_size` together; yield each with what
        came of it.

        The model is taken by ``scheduler.take(place, request.deadline, ...)``; errors are yielded. KV that cannot be read raises
        `ChunkReadError`: after ``request.supply.note_unreadable`` the prompt is read again, and the chunk is a miss. `Outputs` of
        `engine.decode` takes tokens as they are chosen: it streams and stops them, and makes the result.
        """

    @abstractmethod
    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        """Prefill a prompt; return its last ``(count, vocab)`` logits, on the CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningForward:
    """The prefill of a prompt that is about to run, and the decoding after it."""

    request: Request
    decoder: Decoder
    # The prompt's, empty.
    cache: BlendCache
    # What blends the prefill; None where that is in full, or the model only goes on after stored KV.
    steering: Steering | None
    # Most tokens that follow within it; 0 for a prefill alone.
    headroom: int
    # Tokens for which each layer of the cache is given room at once.
    room: int


class Attachment:
    """What `BlendEngine.attach` attaches to an engine: it takes part in the requests that come from then on.

    A subclass overrides what it needs; by default each method does nothing. It registers its own figures with those of the engine
    (`EngineMetrics.registry`). Requests are shown to it by the threads that compute them.
    """

    leave: Callable[[], None] | None = None
    """What detaches it; None before it is attached, which it is once."""

    def attached(self, engine: Any) -> None:
        """Begin to serve an engine, a `BlendEngine`, or raise why it cannot."""

    def around(self, forward: RunningForward) -> AbstractContextManager[object]:
        """Return what is entered around the prefill and decoding of a prompt; asked anew if stored KV turns out damaged."""
        return nullcontext()

    def alone_reason(self, request: Request) -> str | None:
        """Return why a prompt must be answered alone, by a steered prefill if any is blended; None if it need not."""
        return None

    def answered(self, request: Request, result: GenerationResult) -> None:
        """Take note of an answer that came to its end."""

    def for_tenant(self) -> Attachment | None:
        """Return what is attached to an engine of another tenant that is made of this one's; None for nothing."""
        return None

    def close(self) -> None:
        """Detach it, as the engine does when it is closed; a second time nothing happens."""
        if self.leave is not None:
            with suppress(ValueError):
                self.leave()


def engine_class(model: Any) -> Any:
    """Return the installed engine that claims a model (a name, a path, or what transformers has loaded); None if none does.

    The entry points of ``cacheblend_rag.engines`` are classes with a method ``claims(model)``.
    """
    for point in entry_points(group="cacheblend_rag.engines"):
        try:
            engine = point.load()
        except ImportError as error:
            logger.warning("the engine %r is installed, but not what it needs: %s", point.name, error)
            continue
        if engine.claims(model):
            return engine
    return None
