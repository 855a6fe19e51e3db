"""Writing a store to one file, from which another machine warms its own, and adding such a file to a store.

The file is a tar archive, each member a plain file, in this order::

    cacheblend-rag-export.json   the format and its version
    kv/KEY.safetensors           the chunk files of up to 256 entries, byte for byte
    entries/000000.json          what the index knows of these; then the next ones
    names/000000.json            up to 256 names; those of a document stand together, in the order in which they came
    manifest.json                how many entries and names there are, and a digest of everything before it
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import secrets
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice
from logging import getLogger
from pathlib import Path
from typing import IO, Any, TypeVar

from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFormatError
from cacheblend_rag.reading import Place, ReadingRules
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk
from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.documents import NamedPiece
from cacheblend_rag.store.folder import storing, valid_key
from cacheblend_rag.store.names import Names

__all__ = ["ExportReport", "ImportReport", "export_store", "import_store"]

_log = getLogger(__name__)

_Kind = TypeVar("_Kind")

_FORMAT, _VERSION = "cacheblend-rag export", 2
_HEAD, _MANIFEST = "cacheblend-rag-export.json", "manifest.json"
_KV = re.compile(r"kv/([0-9a-f]{8,128})\.safetensors")
_LIST = re.compile(r"(entries|names)/\d{6,12}\.json")
# Entries, or names, in one list.
_BATCH = 256
_LONGEST_LIST_BYTES = 256 * 1024**2
# The head and the manifest are a line each.
_LONGEST_LINE_BYTES = 1024


@dataclass(slots=True)
class ExportReport:
    """What was written: chunks with KV, names, the file's bytes, and the damaged chunks left out."""

    entries: int = 0
    names: int = 0
    nbytes: int = 0
    damaged: int = 0


@dataclass(slots=True)
class ImportReport:
    """What an import did.

    Attributes
    ----------
    entries, held : int
        Chunks whose KV is new here, and those whose KV was here already.
    names, unchanged, kept : int
        Names that are new here, those that were here with the same text, and those that were here with another, which stays.
    nbytes : int
        Bytes of KV added.
    """

    entries: int = 0
    held: int = 0
    names: int = 0
    unchanged: int = 0
    kept: int = 0
    nbytes: int = 0


def export_store(
    location: str | Path, file: str | Path, tenant: str | None = None, ids: Collection[str] | None = None
) -> ExportReport:
    """Write the KV and names of a store to one file, which is there whole or not at all.

    Other processes may go on using the store. What has expired or is damaged is left out; what expires takes its remaining time
    with it. Pins belong to this machine and are not exported.

    Parameters
    ----------
    location : str or Path
        The store's folder, which is only read.
    file : str or Path
        Where to write; a file that is there is replaced.
    tenant : str, optional
        Only what belongs to this tenant; "" is for what has no tenant.
    ids : collection of str, optional
        Only these names and their KV.

    Returns
    -------
    ExportReport
        What was written.

    Raises
    ------
    StoreError
        If the folder is not a store, or the file cannot be written.
    """
    path = Path(file).expanduser()
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    report = ExportReport()
    with existing_store(location) as tier:
        with storing(path.parent):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with storing(path.parent), open(fd, "wb") as stream:
                _export(tier, _ArchiveWriter(stream), report, tenant, None if ids is None else set(ids))
                stream.flush()
                os.fsync(stream.fileno())
                report.nbytes = stream.tell()
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return report


def _export(
    tier: DiskTier, archive: _ArchiveWriter, report: ExportReport, tenant: str | None, ids: Collection[str] | None
) -> None:
    names = Names(tier.index, tier.clock.now)

    def wanted(owner: str, id: str) -> bool:
        return tenant in (None, owner) and (ids is None or id in ids)

    # Of a chunk whose context is not all exported the KV stays here: it remembers what is left out.
    keys = None if ids is None else {row[3] for row in _rows(names, wanted, 0.0)}
    now = tier.clock.now()
    entries = (
        (key, entry)
        for key, entry in tier.index.entries()
        if entry.is_live(now) and tenant in (None, entry.tenant) and (keys is None or key in keys)
    )
    listed = []
    for key, entry in entries:
        try:
            data = tier.folder.open(entry.file, Path.read_bytes)
        except FileNotFoundError:
            # Dropped by another process just now.
            continue
        try:
            if _verified(key, data).digest != entry.digest:
                raise ChunkReadError(key, f"file {entry.file} is not the one that was written")
        except ChunkReadError as error:
            _log.warning("left out: %s", error)
            report.damaged += 1
            continue
        archive.add(f"kv/{key}.safetensors", data)
        lives_s = None if entry.expires_at is None else entry.expires_at - now
        listed.append({"key": key, "tenant": entry.tenant, "lives_s": lives_s})
        report.entries += 1
        if len(listed) == _BATCH:
            archive.add_list("entries", listed)
            listed = []
    archive.add_list("entries", listed)
    rows = _rows(names, wanted, now)
    while some := list(islice(rows, _BATCH)):
        report.names += len(some)
        archive.add_list("names", some)
    archive.close(report.entries, report.names)


def _rows(names: Names, wanted: Callable[[str, str], bool], now: float) -> Iterator[list[Any]]:
    """Yield a row of each name: those of no document, then document by document."""
    for namespace, owner, rules, pieces in names.pieces(wanted):
        for record, expires_at in pieces:
            lives_s = None if expires_at is None else expires_at - now
            stands: list[Any] | None = None
            if place := record.place:
                stands = [place.document, place.start, place.previous, place.length, place.text, list(place.ends)]
                stands += [lives_s, rules.limit]
            ids = [list(record.token_ids), list(record.separator)]
            yield [namespace, owner, record.id, record.key, record.text_hash, *ids, stands]


class _ArchiveWriter:
    """Writes an exported file to a stream, and digests it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
        self._digest = hashlib.blake2b(digest_size=32)
        self._lists = {"entries": 0, "names": 0}
        self.add(_HEAD, _json({"format": _FORMAT, "version": _VERSION}))

    def add_list(self, kind: str, rows: list[Any]) -> None:
        """Add a list of what is known of entries, or of names."""
        if rows:
            self.add(f"{kind}/{self._lists[kind]:06}.json", _json(rows))
            self._lists[kind] += 1

    def add(self, name: str, data: bytes) -> None:
        """Add a member."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o600
        self._digest.update(_label(name, len(data)))
        self._digest.update(data)
        self._tar.addfile(member, io.BytesIO(data))

    def close(self, entries: int, names: int) -> None:
        """Add the manifest, which says how many entries and names there are, and end the file."""
        self.add(_MANIFEST, _json({"entries": entries, "names": names, "digest": self._digest.hexdigest()}))
        self._tar.close()


def import_store(location: str | Path, file: str | Path) -> ImportReport:
    """Add the KV and names in an exported file to a store, which is made if there is none.

    Every byte of the file is verified before anything of it is in the store. What is in the store already stays as it is, so that
    importing twice does nothing more. Chunks that join a document which is here get keys for their context here,
    and so do the chunks after them; KV that no name then leads to is not kept.

    Who can write such a file can choose what the model will read as stored KV: import only
    files whose origin you trust.

    Parameters
    ----------
    location : str or Path
        The store's folder.
    file : str or Path
        The exported file.

    Returns
    -------
    ImportReport
        What was added.

    Raises
    ------
    StoreFormatError
        If the file is not an export, or one of a later version.
    StoreFullError
        If the disk has no room.
    StoreError
        If the file is damaged or cannot be read, or the folder cannot be used.
    """
    path = Path(file).expanduser()
    report = ImportReport()
    try:
        with open(path, "rb") as stream:
            entries: dict[str, tuple[str, float | None]] = {}
            for name, data in _read_archive(path, stream):
                if name.startswith("entries/"):
                    entries.update(map(_entry, _listed(data)))
                elif name.startswith("names/"):
                    # All of them are read before the first is brought.
                    for row in _listed(data):
                        _piece(row, 0.0)
            with closing(DiskTier(Path(location).expanduser())) as tier:
                rows = _import_kv(tier, _read_archive(path, stream), entries, report)
                for home, group in groupby(rows, key=_home):
                    _import_names(tier, *home, group, report)
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(f"export file {path} is damaged (it has a list that no export has)") from error
    return report


def _import_kv(
    tier: DiskTier,
    members: Iterator[tuple[str, bytes]],
    entries: dict[str, tuple[str, float | None]],
    report: ImportReport,
) -> Iterator[list[Any]]:
    """Add the KV among the members, by what is known of the `entries`, and yield the rows of the names, which come after it."""
    for name, data in members:
        match = _KV.fullmatch(name)
        if match is None:
            yield from _listed(data) if name.startswith("names/") else ()
        elif tier.holds([match[1]])[0]:
            report.held += 1
        else:
            key = match[1]
            tenant, lives_s = entries[key]
            expires_at = None if lives_s is None else tier.clock.now() + lives_s
            chunk = EncodedChunk([memoryview(data)], _verified(key, data).digest, len(data))
            tier.put(key, chunk, tenant, expires_at)
            report.entries += 1
            report.nbytes += len(data)


def _home(row: list[Any]) -> tuple[str, str, str | None]:
    """Return the namespace, the tenant and the document of a name."""
    return row[0], row[1], None if row[7] is None else row[7][0]


def _import_names(
    tier: DiskTier, namespace: str, tenant: str, document: str | None, rows: Iterator[list[Any]], report: ImportReport
) -> None:
    """Bring names, those of a document into the one of that name here."""
    names = Names(tier.index, tier.clock.now)
    # A document is read as it is once all of it has come.
    while batch := list(islice(rows, _BATCH if document is None else None)):
        limit = batch[0][7][7] if document is not None else None
        pieces = [_piece(row, tier.clock.now()) for row in batch]
        rules = ReadingRules(limit, pieces[0].record.separator)
        known, dropped = names.merge(namespace, tenant, pieces, rules)
        tier.remove(dropped)
        for (record, _), there in zip(pieces, known, strict=True):
            if there is None:
                report.names += 1
            elif (record.text_hash, record.token_ids) == (there.text_hash, there.token_ids):
                report.unchanged += 1
            else:
                report.kept += 1


def _entry(row: Any) -> tuple[str, tuple[str, float | None]]:
    """Return the key of an entry, and its tenant and how long it lives."""
    return valid_key(row["key"]), (_is(row["tenant"], str), _seconds(row["lives_s"]))


def _piece(row: Any, now: float) -> NamedPiece:
    """Return what a row says of a name."""
    namespace, owner, id, key, text_hash, token_ids, separator, stands = row
    for text in (namespace, owner, id, text_hash):
        _is(text, str)
    place = expires_at = None
    if stands is not None:
        document, start, previous, length, text, ends, lives_s, limit = stands
        for number in (length, 0 if start is None else start, 0 if limit is None else limit):
            _number(number)
        if previous is not None:
            _is(previous, str)
        place = Place(_is(document, str), start, previous, length, _is(text, str), _numbers(ends))
        lives_s = _seconds(lives_s)
        expires_at = None if lives_s is None else now + lives_s
    names = NodeRecord(id, valid_key(key), text_hash, _numbers(token_ids), _numbers(separator), place)
    return NamedPiece(names, expires_at)


def _is(value: Any, kind: type[_Kind]) -> _Kind:
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} was exported")
    return value


def _number(value: Any) -> int:
    number = _is(value, int)
    if not 0 <= number < 2**31:
        raise ValueError("no number that was exported")
    return number


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(_number, _is(values, list)))


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) is bool or not math.isfinite(value):
        raise ValueError("no time that was exported")
    return float(value)


def _read_archive(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of an exported file's members, and raise unless they are, to the end, what was exported."""

    def damaged(why: str) -> StoreError:
        return StoreError(f"export file {path} is damaged ({why}); none of it can be used: copy it again")

    digest = hashlib.blake2b(digest_size=32)
    counted = {"entries": 0, "names": 0}
    is_ours, manifest = False, None
    try:
        for member in _members(stream):
            name, size = member.name, member.size
            if not is_ours and name != _HEAD:
                break
            is_kv = _KV.fullmatch(name) is not None
            is_list = _LIST.fullmatch(name) is not None
            is_expected = is_kv or is_list or name == (_MANIFEST if is_ours else _HEAD)
            # Links, and members with holes in them.
            if manifest is not None or member.type != tarfile.REGTYPE or not is_expected:
                raise damaged(f"it holds {name[:100]!r}, which no export holds")
            if not is_kv and size > (_LONGEST_LIST_BYTES if is_list else _LONGEST_LINE_BYTES):
                raise damaged(f"{name} is too long")
            data = stream.read(size)
            if not is_ours:
                _check_head(path, data)
                is_ours = True
            if name == _MANIFEST:
                manifest = json.loads(data)
                if manifest != {**counted, "digest": digest.hexdigest()}:
                    raise damaged("its bytes do not match its digest")
                continue
            digest.update(_label(name, size))
            digest.update(data)
            counted["entries"] += is_kv
            if name.startswith("names/"):
                counted["names"] += len(_listed(data))
            yield name, data
    except (tarfile.TarError, ValueError, EOFError, RecursionError, TypeError) as error:
        if is_ours:
            raise damaged(str(error)) from error
    if not is_ours:
        raise StoreFormatError(f"file {path} is not an export of a store; make one with `cacheblend-rag store export`")
    if manifest is None:
        raise damaged("it ends before its manifest")


def _members(stream: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive as their headers say, each of a size that is there; what it holds is at `stream`.

    `TarFile` would follow what a header says of other headers, long names and holes, and take memory for it.
    """
    end = stream.seek(0, os.SEEK_END)
    place = stream.seek(0)
    # A block of zeros ends it.
    while any(block := stream.read(tarfile.BLOCKSIZE)):
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        place += tarfile.BLOCKSIZE
        if not 0 <= member.size <= end - place:
            raise EOFError("it is truncated")
        yield member
        place += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        stream.seek(place)


def _check_head(path: Path, data: bytes) -> None:
    head = json.loads(data)
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise StoreFormatError(f"file {path} is not an export of a store; make one with `cacheblend-rag store export`")
    if head.get("version") != _VERSION:
        raise StoreFormatError(
            f"export file {path} is in format version {head.get('version')!r}, but this cacheblend-rag reads version {_VERSION}; "
            "export it again with this version"
        )


class _Bytes:
    """The bytes of a chunk file in memory, as `ChunkFile` reads them."""

    tier = "archive"

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read_into(self, view: memoryview, offset: int) -> int:
        piece = self._data[offset : offset + len(view)]
        view[: len(piece)] = piece
        return len(piece)


def _verified(key: str, data: bytes) -> ChunkFile:
    """Return what reads the bytes of a chunk file, every one verified; ChunkReadError if they are not sound."""
    file = ChunkFile(_Bytes(data), key)
    file.verify()
    return file


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _listed(data: bytes) -> list[Any]:
    rows = json.loads(data)
    if not isinstance(rows, list):
        raise TypeError("not a list")
    return rows


def _label(name: str, size: int) -> bytes:
    """Return what the digest of an archive knows of a member, before its bytes."""
    return f"{name}\0{size}\0".encode()
