"""What frameworks and servers ask of an engine, be it in this process (`BlendEngine`) or elsewhere, and what it returns.

What each method does, and raises, its docstring in `BlendEngine` says.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload, runtime_checkable

import torch
from transformers import StoppingCriteria

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.errors import PromptError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.report import AddResult, BlendReport, WarmEstimate
from cacheblend_rag.stops import Spelling, StopCutter, Thinking
from cacheblend_rag.store import NameChanges, NodeRecord

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cacheblend_rag.engine.ingest import AddJob

__all__ = [
    "AddOptions",
    "BlendStream",
    "Engine",
    "GenerationResult",
    "Library",
    "PrefillResult",
    "StopStrings",
    "in_thread",
]

T = TypeVar("T")


@dataclass(frozen=True)
class PrefillResult:
    """What `BlendEngine.prefill` returns.

    Attributes
    ----------
    logits : torch.Tensor
        Logits of the token after the prompt, ``(vocab,)``, in the model's dtype, on the CPU; ``(logits_to_keep, vocab)`` where
        that was given.
    token_ids : tuple of int
        The whole prompt.
    report : BlendReport
        What it cost.
    """

    logits: torch.Tensor
    token_ids: tuple[int, ...]
    report: BlendReport


@dataclass(frozen=True)
class GenerationResult:
    """What `BlendEngine.generate` returns.

    Attributes
    ----------
    text : str
        The answer, without special tokens.
    token_ids : tuple of int
        The generated ids as the model's own ``generate`` gives them, an end token included; none where a server answered.
    prompt_ids : tuple of int
        The ids of the prompt; none where a server answered.
    report : BlendReport
        What it cost.
    finish_reason : str
        "stop" if it ended by itself, "length" if something else ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    report: BlendReport
    finish_reason: str = "length"


class StopStrings(StoppingCriteria):
    """Ends a generation whose own text, not counting the prompt and thoughts, holds one of the stop strings."""

    # The criterion of transformers counts the prompt's last characters too.

    # Answers with such criteria alone are decoded together (`Many`).
    is_of_one_answer = True

    def __init__(self, tokenizer: Any, stop: str | Sequence[str], thinking: Thinking | None = None) -> None:
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.thinking = thinking
        # Special tokens among them end an answer like its own end tokens, and are in no text.
        special = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids = frozenset(special[each] for each in self.stop if each in special)
        self._spell = partial(Spelling, lambda ids: lexer_of(tokenizer).text(ids, skip_special_tokens=True))
        self._length: float = math.inf

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether a sequence, ``(1, tokens)``, is done; it is asked at every token, from the first on."""
        if input_ids.shape[1] <= self._length:
            # The first token; what fails in a batch comes again.
            self._length = input_ids.shape[1]
            self._spelling, self._cutter = self._spell(), StopCutter(self.stop, self.thinking)
        id = int(input_ids[0, -1])
        deque(self._cutter.feed(self._spelling.add(id)), maxlen=0)
        return torch.tensor([self._cutter.is_done or id in self.ids], device=input_ids.device)


class BlendStream(Iterator[str], AsyncIterator[str]):
    """Pieces of the answer as they are decoded, for a ``for`` loop or an ``async for`` loop.

    The generation runs in its own thread from the start and does not wait to be read: a stream that is not read
    holds nothing up. Closing it, or losing the last reference to it, ends the generation at the next token.

    Parameters
    ----------
    run : callable
        Generates, hands each piece to the function that it is given, ends when the event is set, and returns the result.
    """

    def __init__(self, run: Callable[[Callable[[str], None], threading.Event], GenerationResult]) -> None:
        self._stop = threading.Event()
        # Of each piece comes the future of the next one, too; after the last comes None.
        self._next: Future[Any] = Future()
        weakref.finalize(self, self._stop.set)
        # The thread must not hold this object, or an abandoned stream would never be collected.
        self._answer = _start(partial(_produce, run, self._next, self._stop), "cacheblend-stream")

    def __next__(self) -> str:
        given = self._next.result()
        if given is None:
            # One that was closed just ends; what became of it, `result` says.
            if not self._stop.is_set():
                self._answer.result()
            raise StopIteration
        piece, self._next = given
        return str(piece)

    async def __anext__(self) -> str:
        given = await _awaited(self._next)
        if given is None:
            if not self._stop.is_set():
                await _awaited(self._answer)
            raise StopAsyncIteration
        piece, self._next = given
        return str(piece)

    def close(self) -> None:
        """End the generation at the next token; what was generated until then can still be read.

        One that still waits for the model ends without an answer: `result` raises that it has not begun.
        """
        self._stop.set()

    def result(self) -> GenerationResult:
        """Return the whole answer with its report, waiting for its end.

        Raises
        ------
        CacheBlendError
            If the generation failed.
        """
        return self._answer.result()

    async def aresult(self) -> GenerationResult:
        """Return the whole answer on an event loop, none of whose threads waits; see `result`."""
        return await _awaited(self._answer)


def _produce(
    run: Callable[[Callable[[str], None], threading.Event], GenerationResult], last: Future[Any], stop: threading.Event
) -> GenerationResult:
    """Generate, and hand each piece to who waits for it."""

    def show(piece: str) -> None:
        nonlocal last
        following: Future[Any] = Future()
        last.set_result((piece, following))
        last = following

    try:
        return run(show, stop)
    finally:
        last.set_result(None)


def _start(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a thread of its own; return the future of what it returns or raises."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # handed to the readers
            done.set_exception(error)

    # No daemon: an interpreter that ends while this thread computes, or only lets go of its tensors, would abort.
    threading.Thread(target=run, name=name).start()
    return done


async def _awaited(future: Future[T]) -> T:
    # A reader that is cancelled leaves the work to the others.
    return await asyncio.shield(asyncio.wrap_future(future))


async def in_thread(work: Callable[..., T]) -> T:
    """Return what `work` returns, called in its own thread with an event as `stop`, which is set if the caller is cancelled."""
    stop = threading.Event()
    try:
        return await _awaited(_start(partial(work, stop=stop), "cacheblend-many"))
    finally:
        stop.set()


class AddOptions(TypedDict, total=False):
    """Options of `Library.add`."""

    progress: Callable[[int, int], None] | None
    on_refused: Callable[[Chunk, PromptError], None] | None
    whole: bool
    gone: Sequence[str]


class Library(Protocol):
    """Chunks of one model and one tenant; see `ChunkLibrary`."""

    tokenizer: Any
    config: EngineConfig
    namespace: str
    window: int | None
    is_shared: bool

    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: Literal[False] = False, **options: Unpack[AddOptions]
    ) -> AddResult: ...
    @overload
    def add(self, chunks: Iterable[Chunk], *, background: Literal[True], **options: Unpack[AddOptions]) -> AddJob: ...
    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: bool, **options: Unpack[AddOptions]
    ) -> AddResult | AddJob: ...
    def flush(self) -> None: ...
    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate: ...
    def delete(self, ids: Iterable[str]) -> int: ...
    def sync(self, present_ids: Iterable[str]) -> int: ...
    def document(self, document: str) -> list[str]: ...
    def prefetch(self, ids: Iterable[str]) -> object: ...
    def ids(self, within: str | None = None) -> list[str]: ...
    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]: ...
    def changes(self, since: int | None = None) -> NameChanges: ...
    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout: ...
    def close(self, *, wait: bool = True) -> None: ...


@runtime_checkable
class Engine(Library, Protocol):
    """A model, and the chunks that its prompts are made of; see `BlendEngine`."""

    model_name: str
    blend: BlendConfig

    @property
    def end_ids(self) -> tuple[int, ...]: ...
    def is_called(self, model: str) -> bool: ...
    def check_blend(self, blend: BlendConfig) -> BlendConfig: ...
    def generate(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> GenerationResult: ...
    def stream(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> BlendStream: ...
    def generate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]: ...
    async def agenerate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]: ...
