"""A prompt in tokens: which of its rows are chunks, and what is known of those."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from cacheblend_rag.chunk import text_hash
from cacheblend_rag.encode import Target
from cacheblend_rag.keys import HEAD_PREFIX
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.store import NodeRecord

__all__ = ["AssembledPrompt", "PromptChunk", "PromptHead"]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One chunk of an assembled prompt.

    Attributes
    ----------
    id : str or None
        Its id, if it has one.
    key : str
        Where its KV is or will be stored.
    token_ids : tuple of int
        Its tokens, all of them.
    positions : tuple of int or None
        Where they stand when they are encoded; None for right behind the encoding prefix, without gaps.
    part : tuple of int or None
        The half-open range of its tokens that stand here, where that is not all of them.
    named : bool
        Whether the id was known, for this text, when the prompt was assembled.
    text_hash : str or None
        Digest of the text of a chunk whose id nobody knew.
    note : str or None
        What was found out about it that its report should say.
    deferred : bool
        Whether it is computed like text because it is retrieved for the first time.
    is_missed : bool
        Whether it is computed like text because its KV is missing, and is not waited for.
    is_elsewhere : bool
        Whether it is computed like text because its KV is that of another position.
    row : int
        The row of its first token, of a chunk that is computed like text.
    separator : tuple of int
        Tokens behind its own of which there is KV too.
    is_spaced : bool
        Whether these stand behind it here.
    remembers : bool
        Whether its KV knows of text that stands before it in its document.
    """

    id: str | None
    key: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    part: tuple[int, int] | None = None
    named: bool = False
    text_hash: str | None = None
    note: str | None = None
    deferred: bool = False
    is_missed: bool = False
    is_elsewhere: bool = False
    row: int = 0
    separator: tuple[int, ...] = ()
    is_spaced: bool = False
    remembers: bool = False

    @property
    def kv_ids(self) -> tuple[int, ...]:
        """All tokens of which there is KV, wherever the chunk stands."""
        return self.token_ids + self.separator

    @property
    def rows(self) -> tuple[int, int]:
        """The half-open range of `kv_ids` that stand here."""
        return self.part or (0, len(self.kv_ids if self.is_spaced else self.token_ids))

    def target(self, context: tuple[int, ...] = ()) -> Target:
        """Return what is encoded where its KV is missing."""
        return Target(self.kv_ids, context, self.positions)

    def record(self) -> NodeRecord:
        """Return the record that names the chunk, whose id was unknown."""
        assert self.id is not None and self.text_hash is not None
        return NodeRecord(self.id, self.key, self.text_hash, self.token_ids, self.separator)


@dataclass(frozen=True, slots=True)
class PromptHead:
    """The fixed text that a prompt begins with.

    Attributes
    ----------
    key : str
        Where its KV is or will be stored.
    token_ids : tuple of int
        Its tokens, the BOS among them.
    rows : int
        How many of its rows need not be computed: all of them, but for the prompt's last.
    """

    key: str
    token_ids: tuple[int, ...]
    rows: int

    def record(self) -> NodeRecord:
        """Return the record by which it is listed and deleted; no text is recognised by it."""
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
    has_positions : bool
        Whether the prompt places its segments itself.
    context : tuple of int
        The half-open range of rows from its first chunk to its last one, whether they are blended or computed; a chunk that the
        prompt ends with is not part of it. Empty without chunks.
    head : PromptHead or None
        The fixed text that it begins with, if that is long enough for its KV to be kept.
    """

    layout: PromptLayout
    chunks: tuple[PromptChunk, ...]
    computed: tuple[PromptChunk, ...]
    has_positions: bool
    context: tuple[int, int] = (0, 0)
    head: PromptHead | None = None

    def computing(self, keys: Container[str], note: str) -> AssembledPrompt:
        """Return the prompt with the chunks of some keys computed like text, for the reason in `note`."""
        pairs = list(zip(self.chunks, self.layout.chunks, strict=True))
        kept = [(chunk, span) for chunk, span in pairs if chunk.key not in keys]
        gone = [replace(chunk, note=note, is_missed=True, row=span.start) for chunk, span in pairs if chunk.key in keys]
        exact = next((number for number, (chunk, _) in enumerate(pairs) if chunk.key in keys), len(pairs))
        layout = replace(
            self.layout,
            chunks=tuple(span for _, span in kept),
            exact_chunks=min(self.layout.exact_chunks, exact),
            remembers=any(chunk.remembers for chunk, _ in kept),
        )
        return replace(self, layout=layout, chunks=tuple(chunk for chunk, _ in kept), computed=(*self.computed, *gone))

    @property
    def places(self) -> tuple[int, ...] | None:
        """Where its tokens stand, if it says so itself."""
        return self.layout.positions if self.has_positions else None
