"""The beginning of a prompt that stored KV covers without a gap: vLLM goes on after a prefix, and cannot blend."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import Field

from cacheblend_rag.chunk import BlendPrompt, chunk_key
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.prompt import AssembledPrompt
from cacheblend_rag.report import ChunkReport

__all__ = ["PrefixPiece", "StoredPrefix", "stored_prefix"]


class PrefixPiece(NamedTuple):
    """Tokens of a prompt whose KV is stored: so many of those under a key, from one of them on."""

    key: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    first: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prompt, and the stored KV that it begins with.

    Attributes
    ----------
    token_ids : tuple of int
        All tokens of the prompt.
    pieces : tuple of PrefixPiece
        What its first tokens are taken from, one piece right after the other.
    namespace : str
        Digest of the model, tokenizer, preamble and tenant, which is part of every key.
    ends : str
        Why it ends where it does.
    chunks : tuple of ChunkReport
        The prompt's chunks: those that the pieces cover are hits.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[PrefixPiece, ...]
    namespace: str
    ends: str
    chunks: tuple[ChunkReport, ...] = ()

    @property
    def num_stored(self) -> int:
        """Number of tokens that the pieces cover."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def salt(self) -> str:
        """A digest of whose KV it is and what it knows: prompts of equal tokens and equal salts have equal KV.

        The same text may have been read behind other chunks, so tokens alone do not say which KV a server may share.
        """
        whole = hashlib.blake2b(self.namespace.encode(), digest_size=16)
        for piece in self.pieces:
            whole.update(f"|{piece.key}:{piece.first}:{piece.tokens}".encode())
        return whole.hexdigest()


def stored_prefix(library: ChunkLibrary, prompt: BlendPrompt) -> StoredPrefix:
    """Return how much of a prompt vLLM can take from the store, since it can only go on after a prefix.

    That is what stands before the first chunk, which is encoded now if it is new, and the chunks up to the first whose KV is
    missing, or after which text stands that KV does not cover. What is missing is encoded in the background.

    `library` is a `BlendEngine`, or the `VLLMLibrary` of a model that vLLM serves. `PromptError` as for `BlendEngine.generate`.
    """
    found, held = library.look_up(prompt)
    namespace = library.namespace
    none = library.unsupported_reason
    if found.places is not None:
        none = "the prompt places its segments itself"
    elif not found.chunks:
        none = none or "none of its chunks is served from stored KV"
    if none is not None:
        return _prefix(found, namespace, (), none)
    head = found.leading_ids
    pieces = [PrefixPiece(chunk_key(namespace, head, is_head=True), 0, len(head))] if head else []
    pieces += [PrefixPiece(chunk.key, chunk.first, len(chunk)) for chunk in found.chunks]
    names = [*(["its head"] if head else []), *(f"chunk {chunk.id!r:.60}" for chunk in found.chunks)]
    ends = "here the text after the last chunk begins"
    # Text between two chunks whose KV does not cover it is computed, and so is all that follows.
    for number, (one, other) in enumerate(pairwise(found.chunks), start=1 + bool(head)):
        if one.stop != other.start:
            ends = (
                f"between {names[number - 1]} and {names[number]} stands text, or a chunk, that is computed; KV covers what "
                "EngineConfig.separator says at most, and that as it was when the chunks were added"
            )
            pieces = pieces[:number]
            break
    missing = next((number for number, piece in enumerate(pieces) if piece.key not in held), None)
    if missing is not None:
        ends = f"the KV of {names[missing]} is not stored"
    return _prefix(found, namespace, tuple(pieces[:missing]), ends)


def _prefix(prompt: AssembledPrompt, namespace: str, pieces: tuple[PrefixPiece, ...], ends: str) -> StoredPrefix:
    covered = sum(piece.tokens for piece in pieces)
    chunks = []
    for chunk in sorted((*prompt.chunks, *prompt.computed), key=lambda chunk: chunk.start):
        is_hit = chunk.stop <= covered and chunk.computed is None
        reason = None if is_hit else chunk.note or f"the prefix ends before it: {ends}"
        chunks.append(ChunkReport(chunk.id, len(chunk), is_hit, reason=reason))
    return StoredPrefix(prompt.layout.token_ids, pieces, namespace, ends, tuple(chunks))
