"""A backend that another one stands behind, and that notes which chunks its answers used."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Protocol

from prometheus_client.core import Metric

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_serve.asker import in_thread
from cacheblend_serve.backend import Asked, Backend

__all__ = ["Noting", "Watched"]


class Noting(Protocol):
    """Notes what was used."""

    def note(self, library: ChunkLibrary, chunks: Iterable[tuple[str, int]]) -> None:
        """Take note of chunks of a library by id, and the bytes of each."""


class Watched(Backend):
    """A backend whose answers are noted.

    Parameters
    ----------
    inner : Backend
        What answers.
    held : Noting
        What is told.
    bytes_per_token : int
        Bytes of KV of a token.
    """

    def __init__(self, inner: Backend, held: Noting, bytes_per_token: int) -> None:
        super().__init__(inner.model_name, inner.library(None))
        self.makes_pages = inner.makes_pages
        self._inner = inner
        self._held = held
        self._bytes_per_token = bytes_per_token

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._inner.end_ids

    @property
    def blend(self) -> BlendConfig:
        """How prompts are blended."""
        return self._inner.blend

    def is_ready(self) -> bool:
        return self._inner.is_ready()

    def library(self, tenant: str | None) -> ChunkLibrary:
        return self._inner.library(tenant)

    async def answer(self, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[str | Answer, None]:
        async with aclosing(self._inner.answer(library, asked)) as spoken:
            async for piece in spoken:
                if isinstance(piece, Answer):
                    used = [(each.id, each.tokens * self._bytes_per_token) for each in piece.report.chunks if each.id]
                    await in_thread(self._held.note, library, used)
                yield piece

    def collect(self) -> Iterator[Metric]:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()
