"""What is optional on an engine, attached to it from above: it takes part in the forwards over prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.model import Decoder

__all__ = ["Attachment", "RunningForward"]


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
