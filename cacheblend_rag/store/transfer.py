"""A store in one file, from which another machine warms its own.

The file is a tar archive, each member a plain file, in this order::

    cacheblend-rag-export.json   the format and its version
    kv/KEY.safetensors           the chunk files of up to `_BATCH` entries, byte for byte
    entries/000000.json          what the index knows of these; then the next ones
    names/000000.json            up to `_BATCH` names
    manifest.json                how many entries and names there are, and a digest of everything before it
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from logging import getLogger
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.errors import StoreError, StoreFormatError
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.collect import existing_store
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Entry
from cacheblend_rag.store.names import Names
from cacheblend_rag.store.writers import storing

__all__ = ["ExportReport", "ImportReport", "export_store", "import_store"]

_log = getLogger(__name__)

_FORMAT = "cacheblend-rag export"
_VERSION = 1
_HEAD, _MANIFEST = "cacheblend-rag-export.json", "manifest.json"
_KV = re.compile(r"kv/([0-9a-f]{8,128})\.safetensors")
_LIST = re.compile(r"(entries|names)/\d{6,12}\.json")
_BATCH = 256
_LONGEST_LIST_BYTES = 256 * 1024**2


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
    with it. Pins are this machine's own business and stay here.

    Parameters
    ----------
    location : str or Path
        The store's folder, which is only read.
    file : str or Path
        Where to write; a file that is there is replaced.
    tenant : str, optional
        Only what is this tenant's; "" is for what is no tenant's.
    ids : collection of str, optional
        Only these names and their KV.

    Returns
    -------
    ExportReport
        What was written.

    Raises
    ------
    StoreError
        If the folder is no store, or the file cannot be written.
    """
    folder = existing_store(location)
    path = Path(file).expanduser()
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    tier = DiskTier(folder.path, None)
    report = ExportReport()
    try:
        with storing(path.parent):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with storing(path.parent), open(fd, "wb") as stream:
                writer = _Writer(stream)
                writer.add_json(_HEAD, {"format": _FORMAT, "version": _VERSION})
                _export(tier, writer, report, tenant, ids)
                manifest = {"entries": report.entries, "names": report.names, "digest": writer.digest.hexdigest()}
                writer.add_json(_MANIFEST, manifest)
                writer.close()
                stream.flush()
                os.fsync(stream.fileno())
                report.nbytes = stream.tell()
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    finally:
        tier.close()
    return report


def import_store(location: str | Path, file: str | Path) -> ImportReport:
    """Add the KV and names in an exported file to a store, which is made if there is none.

    Every byte of the file is verified before anything of it is in the store. What is in the store already stays as it is, so that
    importing twice does nothing more. Who can write such a file can choose what the model will read as stored KV: import only
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
            for _ in _members(path, stream):
                pass
            tier = DiskTier(Path(location).expanduser(), None)
            try:
                return _Import(tier, path).run(_members(path, stream))
            finally:
                tier.close()
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error


class _Writer:
    """Writes members and digests them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
        self.digest = hashlib.blake2b(digest_size=32)

    def add_json(self, name: str, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":")).encode("ascii")
        self.add(name, io.BytesIO(data), len(data))

    def add(self, name: str, stream: IO[bytes], size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self.digest.update(_label(name, size))
        self._tar.addfile(member, _Digesting(stream, self.digest))

    def close(self) -> None:
        self._tar.close()


class _Digesting(io.RawIOBase):
    """A stream whose bytes are digested as they are read."""

    def __init__(self, stream: IO[bytes], digest: Any) -> None:
        self._stream = stream
        self._digest = digest

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data


def _label(name: str, size: int) -> bytes:
    return f"{name}\0{size}\0".encode()


def _export(
    tier: DiskTier, writer: _Writer, report: ExportReport, tenant: str | None, ids: Collection[str] | None
) -> None:
    names = Names(tier.database)

    def chosen() -> Iterator[tuple[str, str, NodeRecord]]:
        wanted = None if ids is None else set(ids)
        for namespace, owner, record in names.all():
            if tenant in (None, owner) and (wanted is None or record.id in wanted):
                yield namespace, owner, record

    keys = None if ids is None else {record.key for _, _, record in chosen()}
    now = tier.clock.now()
    entries = (
        (key, entry)
        for key, entry in tier.index.entries()
        if entry.is_live(now) and tenant in (None, entry.tenant) and (keys is None or key in keys)
    )
    number = 0
    while batch := list(islice(entries, _BATCH)):
        listed = []
        for key, entry in batch:
            if not _is_sound(tier, key, entry):
                report.damaged += 1
                continue
            path = tier.folder.file_path(entry.file)
            try:
                with open(path, "rb") as stream:
                    writer.add(f"kv/{key}.safetensors", stream, entry.nbytes)
            except FileNotFoundError:
                # Dropped by another process just now.
                continue
            lives_s = None if entry.expires_at is None else entry.expires_at - now
            listed.append({"key": key, "tenant": entry.tenant, "lives_s": lives_s})
        report.entries += len(listed)
        writer.add_json(f"entries/{number:06}.json", listed)
        number += 1
    records = chosen()
    number = 0
    while rows := [
        [namespace, owner, record.id, record.key, record.text_hash, list(record.token_ids)]
        for namespace, owner, record in islice(records, _BATCH)
    ]:
        report.names += len(rows)
        writer.add_json(f"names/{number:06}.json", rows)
        number += 1


def _is_sound(tier: DiskTier, key: str, entry: Entry) -> bool:
    try:
        file = ChunkFile.open(tier.folder.file_path(entry.file), key)
        file.verify()
    except FileNotFoundError:
        return True
    except StoreError as error:
        _log.warning("left out: %s", error)
        return False
    return file.digest == entry.digest and file.file_bytes == entry.nbytes


def _members(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of the members, and raise unless they are, to the end, what was exported."""

    def damaged(why: str) -> StoreError:
        return StoreError(f"export file {path} is damaged ({why}); nothing of it can be used, copy it again")

    stream.seek(0)
    digest = hashlib.blake2b(digest_size=32)
    counted = {"entries": 0, "names": 0}
    is_ours, manifest = False, None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if not is_ours and member.name != _HEAD:
                    break
                expected = _KV.fullmatch(member.name) or _LIST.fullmatch(member.name)
                if manifest is not None or not member.isreg() or not (expected or member.name in (_HEAD, _MANIFEST)):
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
                if member.name == _MANIFEST:
                    manifest = json.loads(data)
                    if manifest != {**counted, "digest": digest.hexdigest()}:
                        raise damaged("its bytes do not match its digest")
                    continue
                digest.update(_label(member.name, member.size))
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
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise StoreFormatError(f"file {path} is no export of a store; make one with `cacheblend-rag store export`")
    if head.get("version") != _VERSION:
        raise StoreFormatError(
            f"export file {path} is in format version {head.get('version')!r}, this cacheblend-rag reads version {_VERSION}; "
            "export it again with this version"
        )


class _Import:
    """Brings verified members into a store."""

    def __init__(self, tier: DiskTier, path: Path) -> None:
        self._tier = tier
        self._path = path
        self._names = Names(tier.database)
        self._writer = tier.folder.writers.own()
        self._report = ImportReport()
        # Files that lie in the folder and have no entry yet, by key.
        self._files: dict[str, str] = {}
        self._heads: dict[str, tuple[int, bytes]] = {}

    def run(self, members: Iterator[tuple[str, bytes]]) -> ImportReport:
        try:
            for name, data in members:
                if match := _KV.fullmatch(name):
                    self._add_file(match[1], data)
                elif name.startswith("entries/"):
                    self._add_entries(self._parse(name, data, dict))
                elif name.startswith("names/"):
                    self._add_names(self._parse(name, data, list))
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
        self._tier.index.expect(name, self._writer)
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
        self._tier.remove(self._tier.index.drop(old, self._writer))
        taken = self._tier.index.add_many(entries)
        for key, entry in entries:
            del self._files[key]
            if entry.file not in taken:
                self._report.entries += 1
                self._report.nbytes += entry.nbytes
        self._report.held += len(taken)
        self._tier.remove(Dropped(files=taken))

    def _add_names(self, rows: list[list[Any]]) -> None:
        for (namespace, tenant), group in groupby(rows, key=lambda row: (row[0], row[1])):
            records = [NodeRecord(row[2], valid_key(row[3]), row[4], tuple(row[5])) for row in group]
            known = self._names.lookup(namespace, [record.id for record in records])
            new = [record for record, there in zip(records, known, strict=True) if there is None]
            self._tier.remove(self._names.record(namespace, new, self._writer, tenant))
            self._report.names += len(new)
            same = sum(record == there for record, there in zip(records, known, strict=True))
            self._report.unchanged += same
            self._report.kept += len(records) - len(new) - same
