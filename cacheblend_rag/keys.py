"""Store keys: digests of all that a chunk's KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["HEAD_PREFIX", "chunk_key", "context_digest"]

HEAD_PREFIX = "cacheblend/head/"
"""Beginning of the names of prompts' fixed heads, and of no chunk's id."""


def chunk_key(
    namespace: str,
    token_ids: Sequence[int],
    places: Sequence[int] | None = None,
    context: str = "",
    *,
    is_head: bool = False,
) -> str:
    """Return the key of the KV of a chunk, or of what prompts begin with: 40 hexadecimal digits (blake2b, 160 bits)."""
    # Keys of what is read right behind the preamble stay what they are in every store there is.
    placed = b"" if places is None else b"|at|" + _packed(places)
    before = b"|head|" if is_head else b"" if not context else b"|behind|" + context.encode()
    return hashlib.blake2b(namespace.encode() + _packed(token_ids) + placed + before, digest_size=20).hexdigest()


def context_digest(context: Sequence[int]) -> str:
    """Return 32 hexadecimal digits of a context's token ids; the empty string where there are none."""
    return hashlib.blake2b(_packed(context), digest_size=16).hexdigest() if context else ""


def _packed(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype="<i4").tobytes()
