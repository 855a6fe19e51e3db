"""A prompt in tokens: which of its rows are chunks, and what is known of those."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from cacheblend_rag.chunk import text_hash
from cacheblend_rag.encode import Target
from cacheblend_rag.keys import HEAD_PREFIX
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.store import NodeRecord

__all__ = ["AssembledPrompt", "PromptChunk", "PromptHead"]


@dataclass(frozen=True, slots=True)
class PromptChunk(ChunkSpan):
    """A chunk of a prompt: where it stands, and what is known of it.

    Attributes
    ----------
    id : str or None
        Its id, if it has one.
    key : str
        Where its KV is or will be stored.
    token_ids : tuple of int
        Its tokens, all of them.
    separator : tuple of int
        Tokens after its own of which there is KV too.
    first : int
        Which of all these tokens is the first to stand here.
    positions : tuple of int or None
        The positions of its tokens when they are encoded; None for right after the preamble, without gaps.
    named : bool
        Whether the id was known, for this text, when the prompt was assembled.
    text_hash : str or None
        Digest of the text of a chunk whose id was unknown.
    remembers : bool
        Whether its KV knows of text that stands before it in its document.
    computed : {"last", "moved", "missing", "unread"} or None
        Why it is computed like text: the prompt ends with it, its KV is that of another position, its KV is missing and not
        waited for, or its name cannot be read. None for a chunk that is served from KV.
    note : str or None
        Why it is computed like text, or else why its KV may be missing, where its name says that.
    source : str or None
        What its text was made of, for one that was not added.
    """

    id: str | None
    key: str
    token_ids: tuple[int, ...]
    separator: tuple[int, ...] = ()
    first: int = 0
    positions: tuple[int, ...] | None = None
    named: bool = False
    text_hash: str | None = None
    remembers: bool = False
    computed: Literal["last", "moved", "missing", "unread"] | None = None
    note: str | None = None
    source: str | None = None

    @property
    def kv_ids(self) -> tuple[int, ...]:
        """All tokens of which there is KV, wherever the chunk stands."""
        return self.token_ids + self.separator

    @property
    def is_part(self) -> bool:
        """Whether not all of its tokens stand here."""
        return len(self) < len(self.token_ids)

    @property
    def record(self) -> NodeRecord:
        """The record that names the chunk, whose id was unknown."""
        assert self.id is not None and self.text_hash is not None
        return NodeRecord(self.id, self.key, self.text_hash, self.token_ids, self.separator, source=self.source)

    def target(self, context: tuple[int, ...]) -> Target:
        """Return what is encoded where its KV is missing."""
        return Target(self.kv_ids, context, self.positions)


@dataclass(frozen=True, slots=True)
class PromptHead:
    """The fixed text that a prompt begins with: its tokens, the BOS among them, and where their KV is or will be stored.

    Of its `rows` none need be computed: all, but for the prompt's last.
    """

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
    """A prompt in tokens.

    Attributes
    ----------
    layout : PromptLayout
        Token ids and the place of each blended chunk.
    chunks : tuple of PromptChunk
        The chunks of the layout, in order.
    computed : tuple of PromptChunk
        Chunks of the prompt that are computed like text; their note says why.
    places : tuple of int or None
        Where its tokens stand, if the prompt says so itself.
    context : tuple of int
        The half-open range of rows from its first chunk to its last one, whether they are blended or computed; a chunk that the
        prompt ends with is not part of it. Empty without chunks.
    head : PromptHead or None
        The fixed text that it begins with, if that is long enough for its KV to be kept.
    skipped : tuple of str
        The ids of chunks that were left out, because they are not known any more.
    """

    layout: PromptLayout
    chunks: tuple[PromptChunk, ...] = ()
    computed: tuple[PromptChunk, ...] = ()
    places: tuple[int, ...] | None = None
    context: tuple[int, int] = (0, 0)
    head: PromptHead | None = None
    skipped: tuple[str, ...] = ()

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """The tokens before the first chunk; none without a chunk, or where the prompt places its segments itself."""
        return self.layout.token_ids[: self.chunks[0].start] if self.chunks and self.places is None else ()

    def computing(self, keys: Container[str], note: str) -> AssembledPrompt:
        """Return the prompt with the chunks of some keys, whose KV is missing, computed like text."""
        kept = tuple(chunk for chunk in self.chunks if chunk.key not in keys)
        gone = [replace(chunk, computed="missing", note=note) for chunk in self.chunks if chunk.key in keys]
        layout = replace(
            self.layout,
            chunks=kept,
            remembers=any(chunk.remembers for chunk in kept),
        )
        return replace(self, layout=layout, chunks=kept, computed=(*self.computed, *gone))
