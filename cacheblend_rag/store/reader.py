"""What readers of KV have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from cacheblend_rag.store.base import KVReader

__all__ = ["HoldingReader", "PassingReader"]


class _Held(Protocol):
    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...

    @property
    def context(self) -> str: ...

    @property
    def layers(self) -> Sequence[object]: ...

    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=_Held)
Inner = TypeVar("Inner", bound=KVReader)


class HoldingReader(Generic[Held]):
    """Reads KV that is in memory; a reader of it adds how a layer is handed over.

    Parameters
    ----------
    kv : Held
        The KV of one chunk.
    """

    def __init__(self, kv: Held) -> None:
        self._kv = kv

    @property
    def packed_bytes(self) -> int:
        """Size of all layers as they are packed."""
        return self._kv.nbytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._kv.token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._kv.start

    @property
    def context(self) -> str:
        """Digest of the tokens that it was computed behind, beside the encoding prefix; empty where alone."""
        return self._kv.context

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._kv.layers)


class PassingReader(Generic[Inner]):
    """Reads through another reader, and says of the KV what that one says; a reader of this kind adds how a layer is read.

    Parameters
    ----------
    reader : KVReader
        What is read.
    """

    def __init__(self, reader: Inner) -> None:
        self._reader = reader

    @property
    def tier(self) -> str:
        """Where the bytes are read from."""
        return self._reader.tier

    @property
    def codec(self) -> str:
        """How its layers are packed there, most of them if not all alike."""
        return self._reader.codec

    @property
    def packed_bytes(self) -> int:
        """Size of all layers as they are packed there."""
        return self._reader.packed_bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._reader.token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._reader.start

    @property
    def context(self) -> str:
        """Digest of the tokens that it was computed behind, beside the encoding prefix; empty where alone."""
        return self._reader.context

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self._reader.num_layers
