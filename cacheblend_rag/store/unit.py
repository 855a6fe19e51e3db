"""What one document, or one chunk of none, is in the names that machines share: its chunks' records, as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.archive import name_row, read_piece
from cacheblend_rag.store.documents import NamedPiece

__all__ = ["Unit", "UnitName"]


@dataclass(frozen=True, slots=True)
class UnitName:
    """Which unit it is.

    Attributes
    ----------
    namespace : str
        Where its names are.
    document : str or None
        The document.
    id : str or None
        The chunk, where it is of no document.
    """

    namespace: str
    document: str | None = None
    id: str | None = None

    def packed(self) -> str:
        """Return it as a text."""
        return json.dumps([self.namespace, self.document, self.id], ensure_ascii=False)

    @classmethod
    def unpacked(cls, text: str) -> UnitName:
        """Return what `packed` made a text of."""
        try:
            namespace, document, id = json.loads(text)
        except ValueError as error:
            raise StoreError(f"the shared names speak of {text[:80]!r}, which no cacheblend-rag has written") from error
        return cls(namespace, document, id)


@dataclass(frozen=True, slots=True)
class Unit:
    """A document, or a chunk of none, as it is now.

    Attributes
    ----------
    name : UnitName
        Which.
    tenant : str
        Whose it is.
    rules : ReadingRules
        How it is read.
    pieces : sequence of NamedPiece
        Its chunks, in the order in which they came; none where it is no more.
    origins : sequence of (str, str, str)
        The id, an owner and a source of each origin of its chunks.
    """

    name: UnitName
    tenant: str = ""
    rules: ReadingRules = field(default_factory=ReadingRules)
    pieces: Sequence[NamedPiece] = ()
    origins: Sequence[tuple[str, str, str]] = ()

    def packed(self, ahead_s: float) -> bytes | None:
        """Return it as bytes, None where it has no chunks; `ahead_s` is how far the store's time is ahead of the wall clock's."""
        if not self.pieces:
            return None
        rows = [name_row(self.name.namespace, self.tenant, self.rules.limit, piece, ahead_s) for piece in self.pieces]
        state = [self.tenant, self.rules.limit, self.rules.separator, rows, self.origins]
        return json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def unpacked(cls, name: UnitName, state: bytes | None, ahead_s: float) -> Unit:
        """Return what `packed` made bytes of; `ahead_s` is how far the time of the store that asks is ahead of the wall clock's.

        Raises
        ------
        StoreError
            If these are other bytes.
        """
        if state is None:
            return cls(name)
        try:
            tenant, limit, separator, rows, origins = json.loads(state)
            pieces = [read_piece(row, ahead_s) for row in rows]
            rules = ReadingRules(limit, tuple(separator))
            return cls(name, tenant, rules, pieces, [_origin(each) for each in origins])
        except (ValueError, TypeError) as error:
            what = name.document or name.id
            raise StoreError(
                f"what the shared names say of {what!r:.80} cannot be read ({error}); add it again, or delete it"
            ) from error


def _origin(row: Any) -> tuple[str, str, str]:
    id, owner, source = row
    return str(id), str(owner), str(source)
