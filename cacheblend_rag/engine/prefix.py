"""The beginning of a prompt that stored KV covers without a gap, for servers that go on behind a prefix and cannot blend."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.keys import head_key
from cacheblend_rag.report import ChunkReport

__all__ = ["PrefixPiece", "StoredPrefix", "prompt_head", "stored_prefix"]


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Tokens of a prompt whose KV is stored.

    Attributes
    ----------
    key : str
        Where the KV is.
    first : int
        Which of the tokens under that key is the first to stand here.
    count : int
        How many of them stand here.
    """

    key: str
    first: int
    count: int


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
        """How many tokens the pieces cover."""
        return sum(piece.count for piece in self.pieces)

    @property
    def salt(self) -> str:
        """A digest of whose KV it is and what it knows: prompts of equal tokens and equal salts have equal KV.

        The same text remembers another document in another place, so tokens alone do not say which KV a server may share.
        """
        whole = hashlib.blake2b(self.namespace.encode(), digest_size=16)
        for piece in self.pieces:
            whole.update(f"|{piece.key}:{piece.first}:{piece.count}".encode())
        return whole.hexdigest()


def prompt_head(prompt: AssembledPrompt) -> tuple[int, ...]:
    """Return the tokens before the first chunk; none where there is no chunk, or the prompt places its segments itself."""
    if not prompt.chunks or prompt.places is not None:
        return ()
    return prompt.layout.token_ids[: prompt.chunks[0].start]


def stored_prefix(
    prompt: AssembledPrompt, namespace: str, holds: Callable[[Sequence[str]], Sequence[bool]]
) -> StoredPrefix:
    """Return what of a prompt's beginning is stored.

    Parameters
    ----------
    prompt : AssembledPrompt
        The prompt.
    namespace : str
        That of its keys.
    holds : callable
        Says of each key whether its KV is held.
    """
    if prompt.places is not None:
        return _prefix(prompt, namespace, (), "the prompt places its segments itself")
    if not prompt.chunks:
        return _prefix(prompt, namespace, (), "none of its chunks is served from stored KV")
    head = prompt_head(prompt)
    pieces = [PrefixPiece(head_key(namespace, head), 0, len(head))] if head else []
    pieces += [PrefixPiece(chunk.key, chunk.first, len(chunk)) for chunk in prompt.chunks]
    names = [*(["its head"] if head else []), *(f"chunk {chunk.id!r:.60}" for chunk in prompt.chunks)]
    ends = "here the text behind the last chunk begins"
    # Text between two chunks whose KV does not cover it is computed, and so is all that follows.
    for number, (one, other) in enumerate(pairwise(prompt.chunks), start=1 + bool(head)):
        if one.stop != other.start:
            text = "a chunk that is computed" if _between(prompt, one.stop, other.start) else "text"
            ends = (
                f"between {names[number - 1]} and {names[number]} stands {text}; KV covers what EngineConfig.separator says at "
                "most, and that as it was when the chunks were added"
            )
            pieces = pieces[:number]
            break
    held = holds([piece.key for piece in pieces])
    missing = next((number for number, is_held in enumerate(held) if not is_held), None)
    if missing is not None:
        ends = f"the KV of {names[missing]} is not stored"
    return _prefix(prompt, namespace, tuple(pieces[:missing]), ends)


def _prefix(prompt: AssembledPrompt, namespace: str, pieces: tuple[PrefixPiece, ...], ends: str) -> StoredPrefix:
    covered = sum(piece.count for piece in pieces)
    chunks = []
    for chunk in sorted((*prompt.chunks, *prompt.computed), key=lambda chunk: chunk.start):
        is_hit = chunk.stop <= covered and chunk.computed is None
        reason = None if is_hit else chunk.note or f"the prefix ends before it: {ends}"
        chunks.append(ChunkReport(chunk.id, len(chunk), is_hit, reason=reason))
    return StoredPrefix(prompt.layout.token_ids, pieces, namespace, ends, tuple(chunks))


def _between(prompt: AssembledPrompt, start: int, stop: int) -> bool:
    return any(start <= chunk.start < stop for chunk in prompt.computed)
