"""Exporting a store to one file, from which another machine warms its own, and importing such a file (format in `archive`)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, groupby, islice
from logging import getLogger
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ChunkReadError, StoreError
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.archive import Archive, ArchiveWriter, name_rows, read_piece
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, FileSource
from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.folder import storing
from cacheblend_rag.store.names import Names

__all__ = ["ExportReport", "ImportReport", "export_store", "import_store"]

_log = getLogger(__name__)

# Names of no document that are brought in one transaction.
_BATCH = 256


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
                _export(tier, ArchiveWriter(stream), report, tenant, None if ids is None else set(ids))
                stream.flush()
                os.fsync(stream.fileno())
                report.nbytes = stream.tell()
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return report


def _export(
    tier: DiskTier, archive: ArchiveWriter, report: ExportReport, tenant: str | None, ids: Collection[str] | None
) -> None:
    names = Names(tier.index, tier.clock.now)

    def wanted(owner: str, id: str) -> bool:
        return tenant in (None, owner) and (ids is None or id in ids)

    # Of a chunk whose context is not all exported the KV stays here: it remembers what is left out.
    keys = None if ids is None else {piece.record.key for *_, pieces in names.pieces(wanted) for piece in pieces}
    now = tier.clock.now()
    for key, entry in tier.index.entries():
        if not (entry.is_live(now) and tenant in (None, entry.tenant) and (keys is None or key in keys)):
            continue
        try:
            source = tier.folder.open(entry.file, lambda path: FileSource(str(path)))
            file = ChunkFile(source, key)
            file.verify()
            if file.digest != entry.digest:
                raise ChunkReadError(key, f"file {entry.file} is not the one that was written")
        except FileNotFoundError:
            # Dropped by another process just now.
            continue
        except ChunkReadError as error:
            _log.warning("left out: %s", error)
            report.damaged += 1
            continue
        archive.add_entry(key, source, entry.tenant, None if entry.expires_at is None else entry.expires_at - now)
        report.entries += 1
    for namespace, owner, rules, pieces in names.pieces(wanted):
        try:
            rows = name_rows(namespace, owner, rules.limit, pieces, now)
        except ValueError as error:
            place = pieces[0].record.place
            what = f"chunk {pieces[0].record.id!r}" if place is None else f"document {place.document!r}"
            _log.warning("the names of %s are left out: %s", what, error)
            continue
        archive.add_names(rows)
        report.names += len(rows)
    archive.close()


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
            archive = Archive(path, stream)
            archive.check()
            with closing(DiskTier(Path(location).expanduser())) as tier:
                if tier.index.follows_others():
                    raise StoreError(
                        f"the names in {location} are shared with other machines, which an import would not tell; import into a "
                        "folder of its own, or warm this one with the texts"
                    )
                _import_entries(tier, archive, report)
                for home, group in groupby(archive.names(), key=_home):
                    _import_names(tier, *home, group, report)
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error
    return report


def _import_entries(tier: DiskTier, archive: Archive, report: ImportReport) -> None:
    for key, tenant, lives_s, source in archive.entries():
        if tier.holds([key])[0]:
            report.held += 1
            continue
        expires_at = None if lives_s is None else tier.clock.now() + lives_s
        tier.put(key, EncodedChunk(source, ChunkFile(source, key).digest, source.size), tenant, expires_at)
        report.entries += 1
        report.nbytes += source.size


def _home(row: list[Any]) -> tuple[str, str, str | None]:
    """Return the namespace, the tenant and the document of a name."""
    return row[0], row[1], None if row[7] is None else row[7][0]


def _import_names(
    tier: DiskTier, namespace: str, tenant: str, document: str | None, rows: Iterator[list[Any]], report: ImportReport
) -> None:
    """Bring names, those of a document into the one of that name here."""
    names = Names(tier.index, tier.clock.now)
    while batch := list(islice(rows, _BATCH)):
        limit = None if document is None else batch[0][7][7]
        # A document is read as it is once all of it has come.
        pieces = [read_piece(row, tier.clock.now()) for row in chain(batch, () if document is None else rows)]
        del batch
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
