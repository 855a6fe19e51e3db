"""What the demonstration asks of a framework, and the engine that both share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.pml import Prompt

__all__ = ["DemoEngine", "Framework", "FrameworkAnswer"]


@dataclass(frozen=True, slots=True)
class FrameworkAnswer:
    """What a framework gave back.

    Attributes
    ----------
    text : str
        The answer.
    report : dict
        The engine's report, as the framework hands it on.
    """

    text: str
    report: dict[str, Any]


class Framework(Protocol):
    """One framework over one Chroma collection."""

    name: str

    def ingest(self) -> int:
        """Put into the collection what is not there yet, take out what does not belong there; return how many chunks it holds."""

    def retrieve(self, question: str) -> Any:
        """Return what a question is to be answered from, as the framework represents it."""

    def chunk_ids(self, retrieved: Any) -> list[str]:
        """Return the ids of what was retrieved, in prompt order."""

    def answer(self, question: str, retrieved: Any, config: BlendConfig) -> FrameworkAnswer:
        """Answer from what was retrieved."""


class DemoEngine(BlendEngine):
    """An engine that counts what it encodes and remembers when it was called, for figures that frameworks do not hand on.

    Attributes
    ----------
    encoded, unchanged : int
        Chunks that `add` encoded, and that were stored already.
    called_at : float
        When `generate` was last called (`time.perf_counter`).
    """

    encoded = 0
    unchanged = 0
    called_at = 0.0

    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = None,
        ttl_s: float | None = None,
        background: bool = False,
    ) -> Any:
        """Encode chunks, never in the background, and count them."""
        result = super().add(chunks, progress=progress, ttl_s=ttl_s)
        self.encoded += result.encoded
        self.unchanged += result.unchanged
        return result

    def generate(
        self,
        prompt: BlendPrompt | Prompt,
        max_new_tokens: int | None = None,
        *,
        config: BlendConfig | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt and note the time."""
        self.called_at = time.perf_counter()
        return super().generate(prompt, max_new_tokens, config=config, **generation_kwargs)
