"""The documents that chunks are pieces of, and in which order they are read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cacheblend_rag.keys import chunk_key, context_digest
from cacheblend_rag.reading import Member, Place, in_order
from cacheblend_rag.store.base import Later, NamedTarget, NodeRecord
from cacheblend_rag.store.chunkfile import unpack_tokens

__all__ = ["MOST_RECORDS", "Drafts", "document_of", "with_later"]

MOST_RECORDS = 32
"""So many short texts under one name may be a document, wherever in it they stand; more are records of a category."""
# Tokens of a record at most: splitters cut longer pieces.
_RECORD_TOKENS = 80


@dataclass(frozen=True, slots=True)
class _Piece(Member):
    """A chunk of a document; where it `is_changed`, it is to be written."""

    record: NodeRecord
    is_changed: bool
    arrival: int


@dataclass(slots=True)
class _Draft:
    """A document as it will be: its pieces by their ids, in the order in which they came."""

    name: str
    pieces: dict[str, _Piece] = field(default_factory=dict)


class Drafts:
    """The documents of a namespace as changes will leave them; `left` are the ids that leave theirs, `readers` what saw any."""

    def __init__(self, connection: sqlite3.Connection, namespace: str) -> None:
        self.left: set[str] = set()
        self.readers: set[str] = set()
        self._connection = connection
        self._namespace = namespace
        self._drafts: dict[str, _Draft] = {}
        # The document that each id that was looked up is in now.
        self._of: dict[str, str | None] = {}

    def put(self, records: Iterable[NodeRecord]) -> None:
        """Put chunks into their documents, and those of none out of the ones that they are in."""
        for record in records:
            if not record.id:
                continue
            current, place = self.document_of(record.id), record.place
            if place is None:
                self.remove([record.id])
                continue
            self.load(place.document)
            draft = self._drafts.setdefault(place.document, _Draft(place.document))
            old = draft.pieces.get(record.id) if current == place.document else None
            if old is not None and old.place.start == place.start:
                later = record.later or (old.record.later if record.key == old.record.key else None)
                new = replace(
                    old,
                    token_ids=record.token_ids,
                    place=place,
                    record=replace(record, later=later),
                )
                draft.pieces[record.id] = new if new == old else replace(new, is_changed=True)
                continue
            self.remove([record.id])
            # The next number after those of the pieces that are left.
            arrival = next((piece.arrival for piece in reversed(draft.pieces.values())), -1) + 1
            draft.pieces[record.id] = _Piece(record.id, record.token_ids, place, record, True, arrival)
            self._of[record.id] = place.document

    def apart(self, records: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Return records, without place those of a category: many short texts under a name, none with a start."""
        given: dict[str, dict[str, NodeRecord]] = {}
        for record in records:
            if record.id and record.place is not None:
                given.setdefault(record.place.document, {})[record.id] = record
        apart = set[str]()
        for name, new in given.items():
            draft = self.load(name)
            held = [] if draft is None else [piece for id, piece in draft.pieces.items() if id not in new]
            every: list[NodeRecord | _Piece] = [*new.values(), *held]
            short = sum(len(each.token_ids) <= _RECORD_TOKENS for each in every)
            is_placed = any(each.place is not None and each.place.start is not None for each in every)
            if len(every) > MOST_RECORDS and short >= 0.9 * len(every) and not is_placed:
                apart |= new.keys()
        return [replace(each, place=None) if each.id in apart else each for each in records]

    def remove(self, ids: Iterable[str]) -> None:
        for id in ids:
            document = self.document_of(id)
            if document is not None:
                self._drafts[document].pieces.pop(id, None)
                self._of[id] = None
                self.left.add(id)

    def others(self, records: Iterable[NodeRecord]) -> dict[str, str]:
        """Return the chunks of the records' documents that are not among the records, and the document of each."""
        records = list(records)
        ids = {record.id for record in records}
        documents = dict.fromkeys(record.place.document for record in records if record.place is not None)
        return {id: document for document in documents for id in self.ids(document) if id not in ids}

    def names(self) -> list[str]:
        """Return the documents that have been looked at, those that are new or ended among them."""
        return list(self._drafts)

    def ids(self, document: str) -> list[str]:
        draft = self.load(document)
        return [] if draft is None else [piece.id for piece in in_order(draft.pieces.values())]

    def pieces(self, document: str) -> list[NodeRecord]:
        """Return the chunks of a document, with their places, in the order in which they came."""
        draft = self.load(document)
        pieces = [] if draft is None else draft.pieces.values()
        return [replace(piece.record, place=piece.place) for piece in pieces]

    def members(self, document: str) -> list[Member]:
        """Return the chunks of a document in reading order."""
        draft = self.load(document)
        return [] if draft is None else list(in_order(draft.pieces.values()))

    def targets(self) -> dict[str, NamedTarget]:
        """Return by their ids all chunks of the documents, in reading order."""
        found: dict[str, NamedTarget] = {}
        for draft in self._drafts.values():
            for piece in in_order(draft.pieces.values()):
                found[piece.id] = NamedTarget(piece.record, piece.is_changed, draft.name)
        return found

    def save(self) -> None:
        """Write the documents."""
        execute = self._connection.execute
        gone = "DELETE FROM members WHERE seq = (SELECT seq FROM nodes WHERE namespace = ? AND id = ?)"
        self._connection.executemany(gone, ((self._namespace, id) for id in self.left))
        for draft in self._drafts.values():
            changed = [piece for piece in draft.pieces.values() if piece.is_changed]
            # Without a piece the document itself is gone, perhaps only just now.
            if changed:
                [number] = execute(
                    "INSERT INTO documents (namespace, name) VALUES (?, ?) ON CONFLICT (namespace, name) DO UPDATE SET name = "
                    "excluded.name RETURNING number",
                    (self._namespace, draft.name),
                ).fetchone()
                for piece in changed:
                    _write_piece(self._connection, self._namespace, number, piece)

    def document_of(self, id: str) -> str | None:
        """Return the document that a chunk will be in, or None; `targets` gives that document from now on."""
        if id not in self._of:
            name = document_of(self._connection, self._namespace, id)
            self._of[id] = name
            if name is not None:
                self.load(name)
        return self._of[id]

    def load(self, document: str) -> _Draft | None:
        """Have a document among those that `targets` gives; return it, or None where there is no such document."""
        if document in self._drafts:
            return self._drafts[document]
        query = "SELECT number FROM documents WHERE namespace = ? AND name = ?"
        row = self._connection.execute(query, (self._namespace, document)).fetchone()
        if row is None:
            return None
        self._drafts[document] = draft = _Draft(document)
        draft.pieces = {piece.id: piece for piece in _read_pieces(self._connection, self._namespace, document, row[0])}
        self._of |= dict.fromkeys(draft.pieces, document)
        return draft


def document_of(connection: sqlite3.Connection, namespace: str, id: str) -> str | None:
    """Return the document that a name is a piece of, or None."""
    row = connection.execute(
        "SELECT documents.name FROM nodes JOIN members USING (seq) JOIN documents ON number = document "
        "WHERE nodes.namespace = ? AND nodes.id = ? AND documents.namespace = nodes.namespace",
        (namespace, id),
    ).fetchone()
    return None if row is None else str(row[0])


def with_later(
    connection: sqlite3.Connection,
    namespace: str,
    seq: int,
    later: str | None,
    behind: bytes | None,
    record: NodeRecord,
) -> NodeRecord:
    """Return a record with what its row says of the KV behind another chunk, as far as that can be."""
    if later is None or behind is None:
        return record
    ids = unpack_tokens(behind)
    if later != chunk_key(namespace, record.token_ids + record.separator, None, context_digest(ids)):
        # The index is damaged.
        return record
    query = "SELECT id, key FROM seen JOIN nodes ON nodes.seq = other WHERE seen.seq = ? ORDER BY id"
    return replace(record, later=Later(later, ids, tuple(connection.execute(query, (seq,)))))


def _read_pieces(connection: sqlite3.Connection, namespace: str, document: str, number: int) -> Iterator[_Piece]:
    query = (
        "SELECT seq, id, key, text_hash, token_ids, separator, later, behind, arrival, start, length, ends "
        "FROM members JOIN nodes USING (seq) WHERE document = ? ORDER BY arrival"
    )
    for row in connection.execute(query, (number,)).fetchall():
        seq, id, key, text_hash, tokens, separator, later, behind, *stands = row
        arrival, start, length, ends = stands
        place = Place(document, start, length, tuple(np.frombuffer(ends, dtype="<u4").tolist()))
        record = NodeRecord(id, key, text_hash, unpack_tokens(tokens), unpack_tokens(separator))
        record = with_later(connection, namespace, seq, later, behind, record)
        yield _Piece(id, record.token_ids, place, record, False, arrival)


def _write_piece(connection: sqlite3.Connection, namespace: str, number: int, piece: _Piece) -> None:
    place = piece.place
    ends = np.asarray(place.ends, dtype="<u4").tobytes()
    row = (number, piece.arrival, place.start, place.length, ends)
    connection.execute(
        "INSERT OR REPLACE INTO members (seq, document, arrival, start, length, ends) "
        "SELECT seq, ?, ?, ?, ?, ? FROM nodes WHERE namespace = ? AND id = ?",
        (*row, namespace, piece.id),
    )
