"""The documents that chunks are pieces of: in which order they are read, and so behind what each is encoded."""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import NamedTuple

from cacheblend_rag.keys import chunk_key, context_digest
from cacheblend_rag.reading import Member, Place, ReadingRules, contexts, in_order, relinked, whole_text
from cacheblend_rag.store.base import NamedTarget, NodeRecord
from cacheblend_rag.store.chunkformat import pack_tokens
from cacheblend_rag.store.pieces import Piece, read_document, read_pieces, record_checksum, write_document, write_piece

__all__ = ["Drafts", "NamedPiece", "document_of"]

_log = getLogger(__name__)


@dataclass(slots=True)
class _Draft:
    """A document as it will be: how it is read, and its pieces by their ids, in the order in which they came."""

    name: str
    rules: ReadingRules
    pieces: dict[str, Piece] = field(default_factory=dict)
    is_changed: bool = False

    @property
    def arrivals(self) -> int:
        """The number of the next piece that comes."""
        return max((piece.arrival for piece in self.pieces.values()), default=-1) + 1

    @property
    def members(self) -> list[Member]:
        """The chunks in reading order."""
        return in_order([piece.member for piece in self.pieces.values()])


class NamedPiece(NamedTuple):
    """A chunk of a document: its record, with its place, and when its time to live is over, by the store's time."""

    record: NodeRecord
    place: Place
    expires_at: float | None


class Drafts:
    """The documents of a namespace that some changes touch, as these leave them.

    Nothing is written before `save`, so that what changes would lead to can be found out beforehand, by a connection that reads.

    Parameters
    ----------
    connection : sqlite3.Connection
        Where a transaction has begun, or one that reads.
    namespace : str
        Where the names are.
    """

    def __init__(self, connection: sqlite3.Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._drafts: dict[str, _Draft] = {}
        # The document that each id that was looked up is in now.
        self._of: dict[str, str | None] = {}
        self._left: set[str] = set()
        self._damaged: list[str] = []

    def put(self, records: Iterable[NodeRecord], rules: ReadingRules, expires_at: float | None) -> None:
        """Put chunks into their documents, those of none out of the ones that they are in.

        Parameters
        ----------
        records : iterable of NodeRecord
            The chunks, with their places.
        rules : ReadingRules
            How their documents are read from now on.
        expires_at : float or None
            When their time to live is over; of several times the latest counts.
        """
        for record in records:
            if not record.id:
                continue
            now, place = self._document(record.id), record.place
            if place is None:
                self._take_out([record.id])
                continue
            draft = self._draft(place.document, rules)
            if draft.rules != rules:
                draft.rules, draft.is_changed = rules, True
            old = draft.pieces.get(record.id) if now == place.document else None
            if old is not None and _stands(old.member.place) == _stands(place):
                lives = None if None in (old.expires_at, expires_at) else max(old.expires_at or 0, expires_at or 0)
                member = Member(record.id, record.token_ids, place)
                is_changed = (member, record.text_hash, lives, rules.separator) != (
                    old.member,
                    old.text_hash,
                    old.expires_at,
                    old.separator,
                )
                draft.pieces[record.id] = Piece(
                    member, record.text_hash, old.key, lives, old.is_changed or is_changed, rules.separator, old.arrival
                )
                continue
            key = None if old is None else old.key
            self._take_out([record.id])
            member = Member(record.id, record.token_ids, place)
            draft.pieces[record.id] = Piece(
                member, record.text_hash, key, expires_at, True, rules.separator, draft.arrivals
            )
            self._of[record.id] = place.document

    def remove(self, ids: Iterable[str]) -> None:
        """Take chunks out of their documents."""
        self._take_out(list(ids))

    def look_at(self, ids: Iterable[str]) -> None:
        """Have the documents of these chunks among those that `targets` gives."""
        for id in ids:
            self._document(id)

    def warn(self) -> None:
        """Say what of the documents is damaged, once the connection has been given back."""
        for what in self._damaged:
            _log.warning("the stored record of %s", what)

    def text(self, document: str) -> tuple[int, ...]:
        """Return the tokens of a whole document; what overlaps stands there once."""
        self.load(document)
        draft = self._drafts.get(document)
        return () if draft is None else whole_text(draft.members, draft.rules)

    @property
    def left(self) -> set[str]:
        """The ids of chunks that leave the documents that they are in."""
        return self._left

    def ids(self, document: str) -> list[str]:
        """Return the ids of a document's chunks in reading order."""
        self.load(document)
        draft = self._drafts.get(document)
        return [] if draft is None else [member.id for member in draft.members]

    def rules(self, document: str) -> ReadingRules | None:
        """Return how a document is read, None where there is no such document."""
        self.load(document)
        draft = self._drafts.get(document)
        return None if draft is None or not draft.pieces else draft.rules

    def pieces(self, document: str) -> tuple[ReadingRules, list[NamedPiece]]:
        """Return how a document is read, and its chunks in the order in which they came."""
        self.load(document)
        draft, targets = self._drafts[document], self.targets(0.0)
        found = []
        for id, piece in draft.pieces.items():
            place = piece.member.place
            found.append(NamedPiece(replace(targets[id].record, place=place), place, piece.expires_at))
        return draft.rules, found

    def targets(self, now: float) -> dict[str, NamedTarget]:
        """Return by their ids all chunks of the documents, in reading order, and behind what each is encoded.

        Parameters
        ----------
        now : float
            The store's time.
        """
        found: dict[str, NamedTarget] = {}
        for draft in self._drafts.values():
            members = draft.members
            pieces = [draft.pieces[member.id] for member in members]
            lives = [
                None if piece.expires_at is None or piece.expires_at <= now else piece.expires_at - now
                for piece in pieces
            ]
            for number, (first, context) in enumerate(contexts(members, draft.rules)):
                piece, member = pieces[number], members[number]
                separator = draft.rules.separator
                key = chunk_key(self._namespace, member.token_ids + separator, None, context_digest(context))
                record = NodeRecord(member.id, key, piece.text_hash, member.token_ids, separator)
                known = [life for life in lives[first : number + 1] if life is not None]
                is_new = piece.is_changed or key != piece.key
                found[member.id] = NamedTarget(record, context, min(known, default=None), is_new, draft.name)
        return found

    def save(self, targets: Mapping[str, NamedTarget], recorded: Container[str] = ()) -> list[str]:
        """Write the documents, and the keys of those names that are others now; return the keys that these had.

        Parameters
        ----------
        targets : mapping
            What `targets` returned.
        recorded : container of str
            The ids whose names are recorded with their keys already.
        """
        replaced = []
        execute = self._connection.execute
        for id in self._left:
            execute(
                "DELETE FROM members WHERE seq = (SELECT seq FROM nodes WHERE namespace = ? AND id = ?)",
                (self._namespace, id),
            )
        for draft in self._drafts.values():
            changed = [piece for piece in draft.pieces.values() if piece.is_changed]
            # Without a piece the document itself is gone, perhaps only just now.
            number = (
                write_document(self._connection, self._namespace, draft.name, draft.rules)
                if draft.pieces and (changed or draft.is_changed)
                else None
            )
            for piece in changed:
                write_piece(self._connection, self._namespace, number, piece)
            for id, piece in draft.pieces.items():
                record = targets[id].record
                if id not in recorded and (piece.key, piece.separator) != (record.key, record.separator):
                    if piece.key is not None:
                        replaced.append(piece.key)
                    tokens, separator = pack_tokens(record.token_ids), pack_tokens(record.separator)
                    execute(
                        "UPDATE nodes SET key = ?, separator = ?, checksum = ? WHERE namespace = ? AND id = ?",
                        (record.key, separator, record_checksum(self._namespace, record, tokens), self._namespace, id),
                    )
        return replaced

    def _draft(self, document: str, rules: ReadingRules) -> _Draft:
        self.load(document)
        return self._drafts.setdefault(document, _Draft(document, rules))

    def _document(self, id: str) -> str | None:
        """Return the document that a chunk is in, which is a draft from now on, or None."""
        if id not in self._of:
            name = document_of(self._connection, self._namespace, id)
            self._of[id] = name
            if name is not None:
                self.load(name)
        return self._of[id]

    def _take_out(self, ids: Sequence[str]) -> None:
        gone: dict[str, list[Member]] = {}
        for id in ids:
            document = self._document(id)
            if document is not None:
                piece = self._drafts[document].pieces.pop(id, None)
                if piece is not None:
                    gone.setdefault(document, []).append(piece.member)
                self._of[id] = None
                self._left.add(id)
        for document, members in gone.items():
            pieces = self._drafts[document].pieces
            for id, previous in relinked([piece.member for piece in pieces.values()], members):
                piece = pieces[id]
                place = replace(piece.member.place, previous=previous)
                pieces[id] = replace(piece, member=replace(piece.member, place=place), is_changed=True)

    def load(self, document: str) -> None:
        """Have a document among those that `targets` gives."""
        if document in self._drafts:
            return
        found = read_document(self._connection, self._namespace, document)
        if found is None:
            return
        number, rules = found
        self._drafts[document] = draft = _Draft(document, rules or ReadingRules())
        if rules is None:
            draft.is_changed = True
            self._damaged.append(f"document {document!r} is damaged; its chunks are read anew when it is added again")
        for id, piece in read_pieces(self._connection, self._namespace, document, number):
            if piece is None:
                self._damaged.append(f"name {id!r} is damaged; its document is read without it until it is added again")
            else:
                draft.pieces[id] = piece
                self._of[id] = document


def document_of(connection: sqlite3.Connection, namespace: str, id: str) -> str | None:
    """Return the document that a name is a piece of, or None."""
    row = connection.execute(
        "SELECT documents.name FROM nodes JOIN members USING (seq) JOIN documents ON number = document "
        "WHERE nodes.namespace = ? AND nodes.id = ? AND documents.namespace = nodes.namespace",
        (namespace, id),
    ).fetchone()
    return None if row is None else str(row[0])


def _stands(place: Place) -> tuple[int | None, str | None]:
    return place.start, place.previous
