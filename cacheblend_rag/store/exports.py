"""Writing a store to one file, from which another machine warms its own.

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
import os
import secrets
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.disk import DiskTier, flaw_of
from cacheblend_rag.store.folder import existing_store, storing
from cacheblend_rag.store.names import Names

__all__ = [
    "ARCHIVE_FORMAT",
    "ARCHIVE_HEAD",
    "ARCHIVE_MANIFEST",
    "ARCHIVE_VERSION",
    "ExportReport",
    "digest_label",
    "export_store",
]

_log = getLogger(__name__)

ARCHIVE_FORMAT, ARCHIVE_VERSION = "cacheblend-rag export", 2
ARCHIVE_HEAD, ARCHIVE_MANIFEST = "cacheblend-rag-export.json", "manifest.json"
# Entries, or names, in one list.
_BATCH = 256


@dataclass(slots=True)
class ExportReport:
    """What was written: chunks with KV, names, the file's bytes, and the damaged chunks left out."""

    entries: int = 0
    names: int = 0
    nbytes: int = 0
    damaged: int = 0


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
    tier = DiskTier(folder.path)
    report = ExportReport()
    try:
        with storing(path.parent):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with storing(path.parent), open(fd, "wb") as stream:
                writer = _ArchiveWriter(stream)
                _export(tier, writer, report, tenant, ids)
                writer.close(report.entries, report.names)
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


def _export(
    tier: DiskTier, writer: _ArchiveWriter, report: ExportReport, tenant: str | None, ids: Collection[str] | None
) -> None:
    names = Names(tier.database)
    chosen = None if ids is None else set(ids)

    def wanted(owner: str, id: str) -> bool:
        return tenant in (None, owner) and (chosen is None or id in chosen)

    # Of a chunk whose context is not all exported the KV stays here: it remembers what is left out.
    keys = None if chosen is None else {row[3] for row in _names(names, wanted, 0.0)}
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
            flaw = flaw_of(tier.folder, key, entry)
            try:
                with open(tier.folder.file_path(entry.file), "rb") as stream:
                    if flaw is not None:
                        _log.warning("left out: %s", flaw)
                        report.damaged += 1
                        continue
                    writer.add(f"kv/{key}.safetensors", stream, entry.nbytes)
            except FileNotFoundError:
                # Dropped by another process just now.
                continue
            lives_s = None if entry.expires_at is None else entry.expires_at - now
            listed.append({"key": key, "tenant": entry.tenant, "lives_s": lives_s})
        report.entries += len(listed)
        writer.add_json(f"entries/{number:06}.json", listed)
        number += 1
    rows = _names(names, wanted, now)
    number = 0
    while some := list(islice(rows, _BATCH)):
        report.names += len(some)
        writer.add_json(f"names/{number:06}.json", some)
        number += 1


def _names(names: Names, wanted: Callable[[str, str], bool], now: float) -> Iterator[list[Any]]:
    """Yield a row of each name: those of no document, then document by document."""
    for namespace, owner, record in names.alone():
        if wanted(owner, record.id):
            yield [*_row(namespace, owner, record), None]
    for namespace, owner, rules, pieces in names.pieces(wanted):
        for record, place, expires_at in pieces:
            lives_s = None if expires_at is None else expires_at - now
            stands = [place.document, place.start, place.previous, place.length, place.text, list(place.ends)]
            yield [*_row(namespace, owner, record), [*stands, lives_s, rules.limit]]


def _row(namespace: str, owner: str, record: NodeRecord) -> list[Any]:
    ids = [list(record.token_ids), list(record.separator)]
    return [namespace, owner, record.id, record.key, record.text_hash, *ids]


class _ArchiveWriter:
    """Writes an exported file to a stream, and digests it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
        self._digest = hashlib.blake2b(digest_size=32)
        self.add_json(ARCHIVE_HEAD, {"format": ARCHIVE_FORMAT, "version": ARCHIVE_VERSION})

    def add_json(self, name: str, value: Any) -> None:
        """Add a member that holds a value as JSON."""
        data = json.dumps(value, separators=(",", ":")).encode("ascii")
        self.add(name, io.BytesIO(data), len(data))

    def add(self, name: str, stream: IO[bytes], size: int) -> None:
        """Add a member of `size` bytes, read from `stream`."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._digest.update(digest_label(name, size))
        self._tar.addfile(member, _Digesting(stream, self._digest))

    def close(self, entries: int, names: int) -> None:
        """Add the manifest, which says how many entries and names there are, and end the file."""
        self.add_json(ARCHIVE_MANIFEST, {"entries": entries, "names": names, "digest": self._digest.hexdigest()})
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


def digest_label(name: str, size: int) -> bytes:
    """Return what the digest of an archive knows of a member, before its bytes."""
    return f"{name}\0{size}\0".encode()
