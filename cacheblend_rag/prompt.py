"""A prompt in tokens: which of its rows are chunks, and what is known of those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.chunk import HEAD_PREFIX, text_hash
from cacheblend_rag.encode import Target
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.store import Later, NodeRecord

__all__ = ["AssembledPrompt", "PromptChunk", "PromptHead"]


@dataclass(frozen=True, slots=True)
class PromptChunk(ChunkSpan):
    """A chunk of a prompt: where it stands, and what is known of it."""

    id: str | None
    # Where the KV that serves it here is or will be stored.
    key: str
    # All of its tokens, and those after them of which there is KV too; the number of the first that stands here.
    token_ids: tuple[int, ...]
    separator: tuple[int, ...] = ()
    first: int = 0
    # Of its tokens when they are encoded; None for right after the preamble, without gaps.
    positions: tuple[int, ...] | None = None
    # Whether the id was known, for this text, when the prompt was assembled.
    named: bool = False
    # The document that it is then a piece of.
    document: str | None = None
    # How its KV behind other chunks is computed, as far as that was chosen.
    later: Later | None = None
    # Why it is computed like text: the prompt ends with it, its KV is that of another position, or its name cannot be read. None
    # for a chunk that is served from KV.
    computed: Literal["last", "moved", "unread"] | None = None
    # Why it is computed like text, or else why its KV may be missing, where its name says that.
    note: str | None = None

    @property
    def kv_ids(self) -> tuple[int, ...]:
        """All tokens of which there is KV, wherever the chunk stands."""
        return self.token_ids + self.separator

    @property
    def is_part(self) -> bool:
        """Whether not all of its tokens stand here."""
        return len(self) < len(self.token_ids)

    @property
    def target(self) -> Target:
        """What is encoded where its KV is missing."""
        behind = self.later.behind if self.later is not None and self.key == self.later.key else ()
        return Target(self.kv_ids, behind, self.positions)


@dataclass(frozen=True, slots=True)
class PromptHead:
    """The fixed text that a prompt begins with: its tokens, the BOS among them, and where their KV is or will be stored."""

    key: str
    token_ids: tuple[int, ...]
    rows: int

    @property
    def record(self) -> NodeRecord:
        """The record by which it is listed and deleted; no text is recognised by it."""
        name = HEAD_PREFIX + self.key
        return NodeRecord(name, self.key, text_hash(name), self.token_ids)


@dataclass(frozen=True, slots=True)
class AssembledPrompt:
    """A prompt in tokens."""

    layout: PromptLayout
    # Those of the layout, in order, and those that are computed like text.
    chunks: tuple[PromptChunk, ...] = ()
    computed: tuple[PromptChunk, ...] = ()
    # Where its tokens stand, if the prompt says so itself.
    places: tuple[int, ...] | None = None
    # The half-open range of rows from its first chunk to its last one, but for one that the prompt ends with.
    context: tuple[int, int] = (0, 0)
    # The fixed text that it begins with, if that is long enough for its KV to be kept.
    head: PromptHead | None = None
    # The ids of chunks that were left out, because they are not known any more.
    skipped: tuple[str, ...] = ()

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """The tokens before the first chunk; none without a chunk, or where the prompt places its segments itself."""
        return self.layout.token_ids[: self.chunks[0].start] if self.chunks and self.places is None else ()
