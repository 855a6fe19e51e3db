"""Adding an exported file to a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.archive import key_of_member, read_archive
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.entries import Dropped, Entry
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.names import Names

__all__ = ["ImportReport", "import_store"]


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
            for _ in read_archive(path, stream):
                pass
            tier = DiskTier(Path(location).expanduser(), None)
            try:
                return _Import(tier, path).run(read_archive(path, stream))
            finally:
                tier.close()
    except OSError as error:
        raise StoreError(f"file {path} cannot be read: {error.strerror or error}") from error


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
                if key := key_of_member(name):
                    self._add_file(key, data)
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
