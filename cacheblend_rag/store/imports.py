"""Adding an exported file to a store."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.errors import StoreError, StoreFormatError
from cacheblend_rag.reading import Place, ReadingRules
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.documents import NamedPiece
from cacheblend_rag.store.exports import ARCHIVE_FORMAT, ARCHIVE_HEAD, ARCHIVE_MANIFEST, ARCHIVE_VERSION, digest_label
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Entry
from cacheblend_rag.store.names import Names

__all__ = ["ImportReport", "import_store"]

_KV = re.compile(r"kv/([0-9a-f]{8,128})\.safetensors")
_LIST = re.compile(r"(entries|names)/\d{6,12}\.json")
_LONGEST_LIST_BYTES = 256 * 1024**2


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


def import_store(location: str | Path, file: str | Path) -> ImportReport:
    """Add the KV and names in an exported file to a store, which is made if there is none.

    Every byte of the file is verified before anything of it is in the store. What is in the store already stays as it is, so that
    importing twice does nothing more. Chunks that join a document which is here have the keys of what they stand behind here,
    and so do those behind them; KV that no name leads to then is not kept.

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
        If the file is no export, or one of a later version.
    StoreFullError
        If the disk has no room.
    StoreError
        If the file is damaged or cannot be read, or the folder cannot be used.
    """
    path = Path(file).expanduser()
    try:
        with open(path, "rb") as stream:
            for _ in _read_archive(path, stream):
                pass
            tier = DiskTier(Path(location).expanduser())
            try:
                return _Import(tier, path).run(_read_archive(path, stream))
            finally:
                tier.close()
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error


class _Import:
    """Brings verified members into a store."""

    def __init__(self, tier: DiskTier, path: Path) -> None:
        self._tier = tier
        self._path = path
        self._names = Names(tier.database, tier.clock.now, tier.writer)
        self._report = ImportReport()
        # Files that lie in the folder and have no entry yet, by key.
        self._files: dict[str, str] = {}
        self._heads: dict[str, tuple[int, bytes]] = {}
        # The document whose names are being read, and those read so far.
        self._document: tuple[str, str, str] | None = None
        self._rows: list[list[Any]] = []

    def run(self, members: Iterator[tuple[str, bytes]]) -> ImportReport:
        try:
            for name, data in members:
                if key := _key_of_member(name):
                    self._add_file(key, data)
                elif name.startswith("entries/"):
                    self._add_entries(self._parse(name, data, dict))
                elif name.startswith("names/"):
                    self._add_names(self._parse(name, data, list))
            self._add_document()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise StoreError(
                f"export file {self._path} is damaged (a list in it is not what an export holds)"
            ) from error
        finally:
            self._tier.remove(Dropped(files=list(self._files.values())))
        return self._report

    def _parse(self, name: str, data: bytes, kind: type) -> list[Any]:
        rows = json.loads(data)
        if not isinstance(rows, list) or not all(isinstance(row, kind) for row in rows):
            raise StoreError(f"export file {self._path} is damaged ({name} is not what an export holds)")
        return rows

    def _add_file(self, key: str, data: bytes) -> None:
        if self._tier.holds([key])[0]:
            self._report.held += 1
            return
        name = self._tier.folder.new_file_name(key)
        self._tier.index.expect(name)
        self._files[key] = name
        self._tier.folder.write(name, [memoryview(data)])
        file = ChunkFile.open(self._tier.folder.file_path(name), key)
        file.verify()
        self._heads[key] = file.file_bytes, file.digest

    def _add_entries(self, rows: list[dict[str, Any]]) -> None:
        now = self._tier.clock.now()
        entries = []
        for row in rows:
            key, lives_s = row["key"], row["lives_s"]
            if key in self._files:
                expires_at = None if lives_s is None else now + float(lives_s)
                entries.append(
                    (key, Entry(self._files[key], *self._heads.pop(key), str(row["tenant"]), now, expires_at))
                )
        # What is there all the same has expired since, or before.
        old = [key for key, _ in entries if (held := self._tier.index.entry(key)) and not held.is_live(now)]
        self._tier.remove(self._tier.index.drop(old))
        taken = self._tier.index.add_many(entries)
        for key, entry in entries:
            del self._files[key]
            if entry.file not in taken:
                self._report.entries += 1
                self._report.nbytes += entry.nbytes
        self._report.held += len(taken)
        self._tier.remove(Dropped(files=taken))

    def _add_names(self, rows: list[list[Any]]) -> None:
        for (namespace, tenant, document), group in groupby(rows, key=_home):
            if document is None:
                self._add_document()
                self._add_alone(namespace, tenant, [_record(row) for row in group])
                continue
            if self._document != (namespace, tenant, document):
                self._add_document()
                self._document = namespace, tenant, document
            self._rows += group

    def _add_alone(self, namespace: str, tenant: str, records: list[NodeRecord]) -> None:
        known = self._names.lookup(namespace, [record.id for record in records])
        new = [record for record, there in zip(records, known, strict=True) if there is None]
        self._tier.remove(self._names.record(namespace, new, tenant))
        self._count(records, known)
        # A name that is here leads to its own.
        others = [record.key for record, there in zip(records, known, strict=True) if there is not None]
        self._tier.remove(self._names.release(others))

    def _add_document(self) -> None:
        """Bring the chunks of the document that was read last into the one of that name here."""
        if self._document is None:
            return
        (namespace, tenant, document), rows = self._document, self._rows
        self._document, self._rows = None, []
        now = self._tier.clock.now()
        pieces = []
        for row in rows:
            _, start, previous, length, text, ends, lives_s, _ = row[7]
            place = Place(document, start, previous, int(length), str(text), tuple(map(int, ends)))
            expires_at = None if lives_s is None else now + float(lives_s)
            pieces.append(NamedPiece(replace(_record(row), place=place), place, expires_at))
        limit, separator = rows[0][7][7], pieces[0].record.separator
        rules = ReadingRules(None if limit is None else int(limit), separator)
        known, dropped = self._names.merge(namespace, tenant, pieces, rules)
        self._tier.remove(dropped)
        self._count([piece.record for piece in pieces], known)

    def _count(self, records: Sequence[NodeRecord], known: Sequence[NodeRecord | None]) -> None:
        for record, there in zip(records, known, strict=True):
            if there is None:
                self._report.names += 1
            elif (record.text_hash, record.token_ids) == (there.text_hash, there.token_ids):
                self._report.unchanged += 1
            else:
                self._report.kept += 1


def _home(row: list[Any]) -> tuple[str, str, str | None]:
    """Return the namespace, the tenant and the document of a name."""
    place = row[7]
    return row[0], row[1], None if place is None else str(place[0])


def _record(row: list[Any]) -> NodeRecord:
    return NodeRecord(row[2], valid_key(row[3]), row[4], tuple(row[5]), tuple(row[6]))


def _read_archive(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of an exported file's members, and raise unless they are, to the end, what was exported."""

    def damaged(why: str) -> StoreError:
        return StoreError(f"export file {path} is damaged ({why}); nothing of it can be used, copy it again")

    stream.seek(0)
    digest = hashlib.blake2b(digest_size=32)
    counted = {"entries": 0, "names": 0}
    is_ours, manifest = False, None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if not is_ours and member.name != ARCHIVE_HEAD:
                    break
                expected = _KV.fullmatch(member.name) or _LIST.fullmatch(member.name)
                if (
                    manifest is not None
                    or not member.isreg()
                    or not (expected or member.name in (ARCHIVE_HEAD, ARCHIVE_MANIFEST))
                ):
                    raise damaged(f"it holds {member.name[:100]!r}, which no export does")
                if not _KV.fullmatch(member.name) and member.size > _LONGEST_LIST_BYTES:
                    raise damaged(f"{member.name} is too long")
                reader = tar.extractfile(member)
                data = b"" if reader is None else reader.read()
                if len(data) != member.size:
                    raise damaged("it is cut short")
                if not is_ours:
                    _check_head(path, data)
                    is_ours = True
                if member.name == ARCHIVE_MANIFEST:
                    manifest = json.loads(data)
                    if manifest != {**counted, "digest": digest.hexdigest()}:
                        raise damaged("its bytes do not match its digest")
                    continue
                digest.update(digest_label(member.name, member.size))
                digest.update(data)
                counted["entries"] += member.name.startswith("kv/")
                if member.name.startswith("names/"):
                    counted["names"] += len(json.loads(data))
                yield member.name, data
                tar.members.clear()  # type: ignore[attr-defined]  # or it remembers every member
    except (tarfile.TarError, ValueError, EOFError, RecursionError, TypeError) as error:
        if is_ours:
            raise damaged(str(error)) from error
    if not is_ours:
        raise StoreFormatError(f"file {path} is no export of a store; make one with `cacheblend-rag store export`")
    if manifest is None:
        raise damaged("it ends before its manifest")


def _check_head(path: Path, data: bytes) -> None:
    head = json.loads(data)
    if not isinstance(head, dict) or head.get("format") != ARCHIVE_FORMAT:
        raise StoreFormatError(f"file {path} is no export of a store; make one with `cacheblend-rag store export`")
    if head.get("version") != ARCHIVE_VERSION:
        raise StoreFormatError(
            f"export file {path} is in format version {head.get('version')!r}, this cacheblend-rag reads version "
            f"{ARCHIVE_VERSION}; "
            "export it again with this version"
        )


def _key_of_member(name: str) -> str | None:
    """Return the store key whose chunk file a member is, or None if it is no chunk file."""
    match = _KV.fullmatch(name)
    return None if match is None else match[1]
