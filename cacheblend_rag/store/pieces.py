"""The rows of documents and of the chunks that they are made of, each under a checksum."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cacheblend_rag.reading import Member, Place, ReadingRules
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkformat import pack_tokens, unpack_tokens

__all__ = ["Piece", "is_sound", "read_document", "read_pieces", "record_checksum", "write_document", "write_piece"]


@dataclass(slots=True)
class Piece:
    """A chunk of a document.

    Attributes
    ----------
    member : Member
        Its tokens and its place.
    text_hash : str
        Digest of its text.
    key : str or None
        The key that its name leads to; None where the name is new.
    expires_at : float or None
        When its time to live is over, by the store's time.
    is_changed : bool
        Whether more is to be written of it than its key.
    separator : tuple of int
        The separator that its name was recorded with.
    arrival : int
        When it came, compared with the other chunks of the document.
    """

    member: Member
    text_hash: str
    key: str | None
    expires_at: float | None
    is_changed: bool
    separator: tuple[int, ...]
    arrival: int


def read_document(connection: sqlite3.Connection, namespace: str, name: str) -> tuple[int, ReadingRules | None] | None:
    """Return a document's number, and how it is read, None where that is damaged; None if there is no such document."""
    query = "SELECT number, tokens, separator, checksum FROM documents WHERE namespace = ? AND name = ?"
    row = connection.execute(query, (namespace, name)).fetchone()
    if row is None:
        return None
    number, limit, separator, checksum = row
    is_typed = isinstance(limit, int | None) and isinstance(separator, bytes) and len(separator) % 4 == 0
    if not is_typed or checksum != _checksum(namespace, name, limit, separator):
        return number, None
    return number, ReadingRules(limit, unpack_tokens(separator))


def write_document(connection: sqlite3.Connection, namespace: str, name: str, rules: ReadingRules) -> int:
    """Write how a document is read, and return its number."""
    separator = pack_tokens(rules.separator)
    row = connection.execute(
        "INSERT INTO documents (namespace, name, tokens, separator, checksum) VALUES (?, ?, ?, ?, ?) ON CONFLICT "
        "(namespace, name) DO UPDATE SET tokens = excluded.tokens, separator = excluded.separator, "
        "checksum = excluded.checksum RETURNING number",
        (namespace, name, rules.limit, separator, _checksum(namespace, name, rules.limit, separator)),
    ).fetchone()
    return int(row[0])


def read_pieces(
    connection: sqlite3.Connection, namespace: str, document: str, number: int
) -> Iterator[tuple[str, Piece | None]]:
    """Yield the id of each chunk of a document, in the order in which they came, and the chunk; None where it is damaged."""
    query = (
        "SELECT nodes.id, nodes.key, nodes.text_hash, nodes.token_ids, nodes.separator, nodes.checksum, arrival, start, "
        "previous, length, body, ends, expires_at, members.checksum FROM members JOIN nodes USING (seq) "
        "WHERE document = ? AND namespace = ? ORDER BY arrival"
    )
    for id, *row in connection.execute(query, (number, namespace)):
        yield id, _piece(namespace, document, number, id, *row)


def write_piece(connection: sqlite3.Connection, namespace: str, number: int | None, piece: Piece) -> None:
    """Write the place of a chunk whose name is recorded."""
    place, id = piece.member.place, piece.member.id
    ends = np.asarray(place.ends, dtype="<u4").tobytes()
    until = None if piece.expires_at is None else float(piece.expires_at)
    row = (number, piece.arrival, place.start, place.previous, place.length, place.text, ends, until)
    connection.execute(
        "INSERT OR REPLACE INTO members (seq, document, arrival, start, previous, length, body, ends, expires_at, checksum) "
        "SELECT seq, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM nodes WHERE namespace = ? AND id = ?",
        (*row, _checksum(id, *row), namespace, id),
    )


def record_checksum(namespace: str, record: NodeRecord, tokens: bytes) -> int:
    """Return the checksum of a name's record, whose token ids are `tokens` when they are packed."""
    texts = "\0".join((namespace, record.id, record.key, record.text_hash))
    # Records without a separator have the checksum that they have in every store there is.
    tail = pack_tokens(record.separator)
    return zlib.crc32(tail, zlib.crc32(tokens, zlib.crc32(texts.encode("utf-8", "surrogatepass"))))


def is_sound(
    namespace: str, node: str, key: str, text_hash: str, tokens: bytes, separator: bytes, checksum: int
) -> bool:
    """Return whether a name's row is what was written."""
    # In a damaged database a value may even have another type.
    texts = all(isinstance(text, str) for text in (namespace, node, key, text_hash))
    if not texts or not isinstance(tokens, bytes) or not isinstance(separator, bytes) or len(separator) % 4:
        return False
    record = NodeRecord(node, key, text_hash, (), unpack_tokens(separator))
    return record_checksum(namespace, record, tokens) == checksum


def _piece(
    namespace: str,
    document: str,
    number: int,
    id: str,
    key: str,
    text_hash: str,
    tokens: bytes,
    separator: bytes,
    checksum: int,
    *place: Any,
) -> Piece | None:
    *row, place_checksum = place
    if not is_sound(namespace, id, key, text_hash, tokens, separator, checksum):
        return None
    if place_checksum != _checksum(id, number, *row):
        return None
    arrival, start, previous, length, body, ends, expires_at = row
    ended = tuple(np.frombuffer(ends, dtype="<u4").tolist())
    member = Member(id, unpack_tokens(tokens), Place(document, start, previous, length, body, ended))
    return Piece(member, text_hash, key, expires_at, False, unpack_tokens(separator), arrival)


def _checksum(*row: Any) -> int:
    # What has another type than it was written with is another value.
    return zlib.crc32(repr(row).encode("utf-8", "surrogatepass"))
