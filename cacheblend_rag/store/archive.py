"""The file that a store is exported to: a tar archive, written here, and read by whoever cannot be sure who wrote it.

Each member is a plain file, in this order::

    cacheblend-rag-export.json   the format and its version
    kv/KEY.safetensors           the chunk files of up to 256 entries, byte for byte, in the order of their keys
    entries/000000.json          what the index knows of these; then the next ones
    names/000000.json            up to 256 names: first those of no document; those of a document stand together, in the order in
                                 which they came
    manifest.json                how many entries and names there are, and a digest of everything before it
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFormatError
from cacheblend_rag.reading import Place
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import ByteSource, ChunkFile
from cacheblend_rag.store.documents import NamedPiece
from cacheblend_rag.store.folder import valid_key

__all__ = ["Archive", "ArchiveWriter", "name_row", "name_rows", "read_piece"]

_FORMAT, _VERSION = "cacheblend-rag export", 2
_HEAD, _MANIFEST = "cacheblend-rag-export.json", "manifest.json"
_KV = re.compile(r"kv/([0-9a-f]{8,128})\.safetensors")
_ROWS_IN_A_LIST = 256
# Parsed, a list takes up to thirty times its bytes.
_LONGEST_LIST_BYTES = 2 * 1024**2
# The head and the manifest are a line each.
_LONGEST_LINE_BYTES = 1024
# A document is read as a whole. It counts numbers, of which each chunk has two a token and takes the time of a hundred more.
_LONGEST_DOCUMENT = 3 * 1024**2
_CHUNK_NUMBERS = 100
_LETTERS_A_NUMBER = 8
_LONGEST_TENANT = 200
_PIECE_BYTES = 1024**2
# What reading a list or a chunk's bytes raises where they are not what is exported.
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class ByteRange:
    """Bytes of a file, from `place` on, as `ChunkFile` reads them; iterating goes through them from the first."""

    tier = "archive"

    def __init__(self, fd: int, place: int, size: int) -> None:
        self.size = size
        self.end = place + size
        self._fd = fd
        self._place = place

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were."""
        view = view[: max(0, self.size - offset)]
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], self._place + offset + done)
            if count == 0:
                break
            done += count
        return done

    def __iter__(self) -> Iterator[memoryview]:
        return _pieces(self)


def _pieces(source: ByteSource) -> Iterator[memoryview]:
    for offset in range(0, source.size, _PIECE_BYTES):
        piece = memoryview(bytearray(min(_PIECE_BYTES, source.size - offset)))
        yield piece[: source.read_into(piece, offset)]


class ArchiveWriter:
    """Writes an exported file to a stream, and digests it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.blake2b(digest_size=32)
        self._lists = {"entries": 0, "names": 0}
        self._counted = {"entries": 0, "names": 0}
        self._rows: dict[str, list[bytes]] = {"entries": [], "names": []}
        self._add(_HEAD, _json({"format": _FORMAT, "version": _VERSION}))

    def add_entry(self, key: str, source: ByteSource, tenant: str, lives_s: float | None) -> None:
        """Add the file of a chunk, and what is known of it; all entries come before all names."""
        self._begin(f"kv/{key}.safetensors", source.size)
        for piece in _pieces(source):
            self._write(piece)
        self._end(source.size)
        self._add_row("entries", _json({"key": key, "tenant": tenant, "lives_s": lives_s}))

    def add_names(self, rows: Sequence[bytes]) -> None:
        """Add the rows of a document's names, or of one of none (`name_rows`)."""
        self._end_list("entries")
        for row in rows:
            self._add_row("names", row)

    def close(self) -> None:
        """Add the manifest, which says how many entries and names there are, and end the file."""
        for kind in self._rows:
            self._end_list(kind)
        self._add(_MANIFEST, _json({**self._counted, "digest": self._digest.hexdigest()}))
        self._stream.write(bytes(2 * tarfile.BLOCKSIZE))

    def _add_row(self, kind: str, row: bytes) -> None:
        rows = self._rows[kind]
        # With what stands between and around them.
        if rows and sum(len(each) + 1 for each in rows) + len(row) + 2 > _LONGEST_LIST_BYTES:
            self._end_list(kind)
        rows.append(row)
        if len(rows) == _ROWS_IN_A_LIST:
            self._end_list(kind)
        self._counted[kind] += 1

    def _end_list(self, kind: str) -> None:
        if self._rows[kind]:
            self._add(f"{kind}/{self._lists[kind]:06}.json", b"[" + b",".join(self._rows[kind]) + b"]")
            self._lists[kind] += 1
            self._rows[kind].clear()

    def _add(self, name: str, data: bytes) -> None:
        self._begin(name, len(data))
        self._write(data)
        self._end(len(data))

    def _begin(self, name: str, size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._stream.write(member.tobuf(tarfile.USTAR_FORMAT))
        self._digest.update(_label(name, size))

    def _write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._stream.write(data)

    def _end(self, size: int) -> None:
        self._stream.write(bytes(-size % tarfile.BLOCKSIZE))


class Archive:
    """Reads an exported file that anybody may have written.

    Nothing takes memory for what the file merely says, and no more is in memory at a time than a list and a piece of a chunk.

    Parameters
    ----------
    path : Path
        The file, for messages.
    stream : IO
        Its bytes.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream

    def check(self) -> None:
        """Verify every byte, and see that all of it is what is exported, where it is exported to.

        Raises
        ------
        StoreFormatError
            If the file is not an export, or one of another version.
        StoreError
            If it is damaged, or holds what no export holds.
        """
        self._check_head()
        try:
            self._check_members()
        except (ChunkReadError, tarfile.TarError) as error:
            raise self._damaged(str(error)) from error
        except _DAMAGES as error:
            raise self._damaged(f"it has a list that no export has: {str(error)[:200]}") from error

    def entries(self) -> Iterator[tuple[str, str, float | None, ByteRange]]:
        """Yield the key of each chunk with KV, its tenant, how many seconds it lives, None for ever, and its file's bytes."""
        files: dict[str, ByteRange] = {}
        for name, member in self._members():
            if chunk := _KV.fullmatch(name):
                files[chunk[1]] = member
            elif name.startswith("entries/"):
                for row in _rows(member):
                    key, tenant, lives_s = _entry(row)
                    yield key, tenant, lives_s, files.pop(key)

    def names(self) -> Iterator[list[Any]]:
        """Yield the row of each name."""
        for name, member in self._members():
            if name.startswith("names/"):
                yield from _rows(member)

    def _check_head(self) -> None:
        try:
            name, member = next(self._members())
            head = json.loads(_whole(member, _LONGEST_LINE_BYTES)) if name == _HEAD else None
        except (StoreError, tarfile.TarError, StopIteration, *_DAMAGES):
            head = None
        if not isinstance(head, dict) or head.get("format") != _FORMAT:
            raise StoreFormatError(
                f"file {self._path} is not an export of a store; make one with `cacheblend-rag store export`"
            )
        if head.get("version") != _VERSION:
            raise StoreFormatError(
                f"export file {self._path} is in format version {head.get('version')!r:.40}, but this cacheblend-rag reads "
                f"version {_VERSION}; export it again with this version"
            )

    def _check_members(self) -> None:
        digest = hashlib.blake2b(digest_size=32)
        counted = {"entries": 0, "names": 0}
        lists = {"entries": 0, "names": 0}
        # Of the chunk files whose entries are still to come.
        keys: list[str] = []
        last_key, standing = "", _Standing()
        for number, (name, member) in enumerate(self._members()):
            kind = name.partition("/")[0]
            if name == _MANIFEST and not keys:
                manifest = json.loads(_whole(member, _LONGEST_LINE_BYTES))
                if manifest != {**counted, "digest": digest.hexdigest()}:
                    raise self._damaged("its bytes do not match its digest")
                self._check_end(member)
                return
            chunk = _KV.fullmatch(name)
            if chunk and chunk[1] > last_key and len(keys) < _ROWS_IN_A_LIST and not lists["names"]:
                keys.append(last_key := chunk[1])
                # Before all of it is read: what its head says of its size must be so.
                ChunkFile(member, last_key).verify()
                counted["entries"] += 1
            elif name == f"entries/{lists['entries']:06}.json" and keys:
                if [_entry(row)[0] for row in _rows(member)] != keys:
                    raise self._damaged(f"{name} is not of the chunks before it")
                keys = []
            elif name == f"names/{lists['names']:06}.json" and not keys:
                for row in _rows(member):
                    standing.see(row)
                    counted["names"] += 1
            elif number or name != _HEAD:
                raise self._damaged(f"it holds {name[:100]!r}, which no export holds there")
            if kind in lists:
                lists[kind] += 1
            digest.update(_label(name, member.size))
            for piece in member:
                digest.update(piece)
        raise self._damaged("it ends before its manifest")

    def _check_end(self, manifest: ByteRange) -> None:
        """See that nothing stands behind the manifest but zeros, as far as a reader of archives would go."""
        self._stream.seek(manifest.end)
        if any(self._stream.read(2 * tarfile.BLOCKSIZE)):
            raise self._damaged("it holds more than its manifest says, which no export holds")

    def _members(self) -> Iterator[tuple[str, ByteRange]]:
        """Yield names and places of the members, as their headers say, each of a size that is there.

        `TarFile` would follow what a header says of other headers, long names and holes, and take memory for it.
        """
        end = self._stream.seek(0, os.SEEK_END)
        place = self._stream.seek(0)
        # A block of zeros ends it.
        while any(block := self._stream.read(tarfile.BLOCKSIZE)):
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            place += tarfile.BLOCKSIZE
            if not 0 <= member.size <= end - place:
                raise self._damaged("it is truncated")
            if member.type != tarfile.REGTYPE:
                raise self._damaged(
                    f"it holds {member.name[:100]!r} as something else than a file, which no export holds"
                )
            yield member.name, ByteRange(self._stream.fileno(), place, member.size)
            place += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            self._stream.seek(place)

    def _damaged(self, why: str) -> StoreError:
        return StoreError(f"export file {self._path} is damaged ({why}); none of it can be used: copy it again")


class _Standing:
    """Sees that names stand as they are exported: those of no document first, those of a document together, none too long."""

    def __init__(self) -> None:
        self._home: tuple[str, str, str] | None = None
        self._ended: set[int] = set()
        self._ids: set[str] = set()
        self._numbers = 0

    def see(self, row: Any) -> None:
        """Look at the next row; ValueError if it does not belong there, or the errors of one that is none."""
        record = read_piece(row, 0.0).record
        home = None if record.place is None else (row[0], row[1], record.place.document)
        if home != self._home:
            self._ended.add(hash(self._home))
            if hash(home) in self._ended:
                raise ValueError(f"names of the document {row[7] and row[7][0]!r:.100} stand apart")
            self._home, self._numbers = home, 0
            self._ids.clear()
        if home is not None:
            self._numbers += _numbers_of(row)
            if record.id in self._ids:
                raise ValueError(f"document {home[2]!r:.100} has the name {record.id!r:.100} twice")
            if self._numbers > _LONGEST_DOCUMENT:
                raise ValueError(f"document {home[2]!r:.100} is longer than any that is exported")
            self._ids.add(record.id)


def name_rows(namespace: str, tenant: str, limit: int | None, pieces: Sequence[NamedPiece], now: float) -> list[bytes]:
    """Return the rows of names: of a document, or of none.

    Raises
    ------
    ValueError
        If it is longer than `Archive` reads.
    """
    rows, numbers = [], 0
    for piece in pieces:
        row = name_row(namespace, tenant, limit, piece, now)
        rows.append(_json(row))
        numbers += _numbers_of(row)
        if numbers > _LONGEST_DOCUMENT or len(rows[-1]) + 2 > _LONGEST_LIST_BYTES:
            raise ValueError("it is longer than an import reads")
    return rows


def name_row(namespace: str, tenant: str, limit: int | None, piece: NamedPiece, now: float) -> list[Any]:
    """Return what `read_piece` makes a name of; when it expires is told from `now` on."""
    record, expires_at = piece
    stands: list[Any] | None = None
    if place := record.place:
        stands = [place.document, place.start, place.previous, place.length, place.text, list(place.ends)]
        stands += [None if expires_at is None else expires_at - now, limit]
    ids = [list(record.token_ids), list(record.separator)]
    return [namespace, tenant, record.id, record.key, record.text_hash, *ids, stands]


def _numbers_of(row: list[Any]) -> int:
    """Return how much of a document a row is, in numbers: what they take is what it takes in memory."""
    stands = row[7]
    text, ends = ("", ()) if stands is None else (stands[4], stands[5])
    return _CHUNK_NUMBERS + len(row[5]) + len(row[6]) + len(ends) + len(text) // _LETTERS_A_NUMBER


def read_piece(row: Any, now: float) -> NamedPiece:
    """Return what a row says of a name."""
    namespace, owner, id, key, text_hash, token_ids, separator, stands = row
    for text in (namespace, id, text_hash):
        _text(text)
    _tenant(owner)
    place = expires_at = None
    if stands is not None:
        document, start, previous, length, text, ends, lives_s, limit = stands
        _numbers([length, *(number for number in (start, limit) if number is not None)])
        if previous is not None:
            _text(previous)
        place = Place(_text(document), start, previous, length, _text(text), _numbers(ends))
        lives_s = _seconds(lives_s)
        expires_at = None if lives_s is None else now + lives_s
    names = NodeRecord(id, valid_key(key), text_hash, _numbers(token_ids), _numbers(separator), place)
    return NamedPiece(names, expires_at)


def _entry(row: Any) -> tuple[str, str, float | None]:
    """Return the key of an entry, its tenant and how long it lives."""
    return valid_key(row["key"]), _tenant(row["tenant"]), _seconds(row["lives_s"])


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("something else than a text")
    # What is no Unicode cannot be stored.
    value.encode()
    return value


def _tenant(value: Any) -> str:
    if len(_text(value)) > _LONGEST_TENANT or not value.isprintable():
        raise ValueError("no tenant has this name")
    return str(value)


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise TypeError("something else than a list of numbers")
    if values and not (min(values) >= 0 and max(values) < 2**31):
        raise ValueError("no number that is exported")
    return tuple(values)


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) is bool or not math.isfinite(value):
        raise ValueError("no time that is exported")
    return float(value)


def _rows(member: ByteRange) -> list[Any]:
    data = _whole(member, _LONGEST_LIST_BYTES)
    # It would look through all that the process has, again and again while a list of lists grows.
    collects = gc.isenabled()
    gc.disable()
    try:
        rows = json.loads(data)
    finally:
        if collects:
            gc.enable()
    if type(rows) is not list or not 0 < len(rows) <= _ROWS_IN_A_LIST:
        raise ValueError(f"not a list of 1 to {_ROWS_IN_A_LIST} rows")
    return rows


def _whole(member: ByteRange, longest_bytes: int) -> bytes:
    if member.size > longest_bytes:
        raise ValueError(f"{member.size} bytes where no export has more than {longest_bytes}")
    return b"".join(map(bytes, member))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _label(name: str, size: int) -> bytes:
    """Return what the digest of an archive knows of a member, before its bytes."""
    return f"{name}\0{size}\0".encode()
