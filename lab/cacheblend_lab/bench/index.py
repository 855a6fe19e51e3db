"""The store's index by the number of its entries: opening, looking up, memory.

``python -m cacheblend_lab.bench.index FOLDER LOOKUPS`` measures one store in a process of its own and prints the
figures as JSON.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cacheblend_lab.bench.runner import Bench, Say, percentiles, say_nothing, seconds_of
from cacheblend_lab.bench.settings import IDS_AT_ONCE, IndexSetting
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import NodeRecord, open_store
from cacheblend_rag.store.base import Later
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.names import Names

__all__ = ["IndexBench", "IndexRow", "make_index"]

_TENANT = hashlib.blake2b(b"bench", digest_size=16).hexdigest()
_TOKENS = 32
_ROWS_AT_ONCE = 20_000
_MEMORY = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Figures of one store.

    Attributes
    ----------
    entries : int
        KVs in the index, two of each chunk, which has a name.
    file_bytes : int
        Size of the index on disk.
    make_s : float
        Seconds to write it, many rows a transaction.
    open_s : float
        Seconds to open the store.
    lookup_p50_s, lookup_p99_s, lookup_max_s : float
        Seconds to find the records of 8 random ids, and whether their KV is held.
    rss_bytes : int
        How much more memory the process holds after opening and all lookups than before.
    """

    entries: int
    file_bytes: int
    make_s: float
    open_s: float
    lookup_p50_s: float
    lookup_p99_s: float
    lookup_max_s: float
    rss_bytes: int


class IndexBench(Bench[IndexSetting, IndexRow]):
    """Makes stores of given sizes, without their chunk files, and measures each in a fresh process."""

    text_columns = 0

    def __init__(self, setting: IndexSetting) -> None:
        super().__init__(setting)
        if not _MEMORY.exists():
            raise ConfigError(f"the memory that the index takes is read from {_MEMORY}, which is not there; use Linux")

    def measure(self, say: Say = say_nothing) -> list[IndexRow]:
        rows = []
        with tempfile.TemporaryDirectory() as temporary:
            for number, size in enumerate(self.setting.entries):
                say(f"measuring, {number} of {len(self.setting.entries)}")
                store = (self.setting.folder or Path(temporary)) / str(size)
                make_s = seconds_of(lambda store=store, size=size: make_index(store, size))  # type: ignore[misc]
                command = [
                    sys.executable,
                    "-m",
                    "cacheblend_lab.bench.index",
                    str(store),
                    str(self.setting.lookups),
                ]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                file_bytes = (store / "index.sqlite").stat().st_size
                rows.append(IndexRow(entries=size, file_bytes=file_bytes, make_s=make_s, **json.loads(done.stdout)))
        return rows

    def title(self, rows: Sequence[IndexRow]) -> str:
        return f"the store's index, {self.setting.lookups} lookups of {IDS_AT_ONCE} ids"

    def cells(self, row: IndexRow) -> dict[str, Any]:
        return {
            "entries": f"{row.entries:,}",
            "index": say_bytes(row.file_bytes),
            "opening": say_seconds(row.open_s),
            f"{IDS_AT_ONCE} ids, median": say_seconds(row.lookup_p50_s),
            f"{IDS_AT_ONCE} ids, 99 %": say_seconds(row.lookup_p99_s),
            "memory": say_bytes(row.rss_bytes),
        }


def make_index(folder: Path, entries: int) -> None:
    """Make a store whose index has `entries` entries, two of each chunk of 32 tokens; their files are not written."""
    tier = DiskTier(folder)
    try:
        names = Names(tier.index, tier.clock)
        rows = _rows(entries)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            with tier.index.write() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO entries (key, bytes, added_at) VALUES (?, 64, 0)",
                    [(key,) for record in batch for key in record.keys],
                )
            names.record(_TENANT, batch)
        tier.index.tidy()
    finally:
        tier.close()


def _rows(entries: int) -> Iterator[NodeRecord]:
    before: NodeRecord | None = None
    for number in range(entries // 2):
        # Keys and ids without order, as digests are.
        key, later = (hashlib.blake2b(f"{number}{of}".encode(), digest_size=20).hexdigest() for of in ("", "later"))
        tokens = tuple((number + 7 * place) % 50_000 for place in range(_TOKENS))
        seen = () if before is None else ((before.id, before.key),)
        behind = Later(later, () if before is None else before.token_ids, seen)
        before = NodeRecord(_id(number), key, key[:32], tokens, later=behind)
        yield before


def _id(number: int) -> str:
    return hashlib.blake2b(f"id{number}".encode(), digest_size=16).hexdigest()


def _measure(folder: Path, lookups: int) -> dict[str, Any]:
    chunks = int(folder.name) // 2
    chance = random.Random(0)
    asked = [[_id(chance.randrange(chunks)) for _ in range(IDS_AT_ONCE)] for _ in range(lookups)]
    gc.collect()
    before = _rss_bytes()
    began = time.perf_counter()
    store = open_store(folder, ram_bytes=0)
    open_s = time.perf_counter() - began
    took = []
    for ids in asked:
        began = time.perf_counter()
        records = store.names.lookup(_TENANT, ids)
        # One of the two KVs of each, as a prompt does.
        held = store.holds([record.key for record in records if record is not None])
        took.append(time.perf_counter() - began)
        if held != [True] * IDS_AT_ONCE:
            raise RuntimeError(f"the index of {folder} has lost some of {ids}")
    rss_bytes = _rss_bytes() - before
    store.close()
    p50_s, p99_s, max_s = percentiles(took)
    return {
        "open_s": open_s,
        "lookup_p50_s": p50_s,
        "lookup_p99_s": p99_s,
        "lookup_max_s": max_s,
        "rss_bytes": rss_bytes,
    }


def _rss_bytes() -> int:
    pages = int(_MEMORY.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), int(sys.argv[2]))))
