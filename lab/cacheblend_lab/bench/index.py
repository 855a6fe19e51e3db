"""The store's index by the number of its entries: opening, looking up, memory.

``python -m cacheblend_lab.bench.index FOLDER ENTRIES`` measures one store in a process of its own and prints the
figures as JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cacheblend_lab.bench.runner import Figures, Row, Say, percentile, rss_bytes, seconds_of
from cacheblend_lab.cli.options import parse_counts
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import Later, NodeRecord, open_store
from cacheblend_rag.store.names import Names
from cacheblend_rag.store.tiers import DiskTier

__all__ = ["make_index", "measure"]

_TENANT = hashlib.blake2b(b"bench", digest_size=16).hexdigest()
_TOKENS, _ROWS_AT_ONCE = 32, 20_000
# Those of the chunks of a prompt.
_IDS, _LOOKUPS = 8, 10_000


def measure(*, entries: str, say: Say) -> Figures:
    """Make stores of given sizes, without their chunk files, and measure each in a fresh process."""
    sizes = parse_counts(entries)
    if min(sizes) < 2 * _IDS:
        raise ConfigError(f"entries {entries} must each be at least {2 * _IDS}, those of the chunks of one lookup")
    rss_bytes()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for size in sizes:
            say(f"measuring {size:,} entries")
            store = Path(temporary) / str(size)
            make_s = seconds_of(make_index, store, size)
            command = [sys.executable, "-m", "cacheblend_lab.bench.index", str(store), str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            index_bytes = (store / "index.sqlite").stat().st_size
            rows.append({"entries": size, "index_bytes": index_bytes, "make_s": make_s} | json.loads(done.stdout))
    return Figures(f"the store's index, {_LOOKUPS:,} lookups of {_IDS} ids", rows)


def make_index(folder: Path, entries: int) -> None:
    """Make a store whose index has so many entries, two of each chunk of 32 tokens; their files are not written."""
    tier = DiskTier(folder)
    try:
        names = Names(tier.index)
        rows = _rows(entries)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            with tier.index.write() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO entries (key, bytes) VALUES (?, 64)",
                    [(key,) for record in batch for key in record.keys],
                )
            names.record(_TENANT, batch)
    finally:
        tier.close()


def _rows(entries: int) -> Iterator[NodeRecord]:
    before: NodeRecord | None = None
    for number in range(entries // 2):
        # Keys and ids without order, as digests are.
        key, later = _digest(f"{number}"), _digest(f"{number}later")
        tokens = tuple((number + 7 * place) % 50_000 for place in range(_TOKENS))
        seen = () if before is None else ((before.id, before.key),)
        behind = Later(later, () if before is None else before.token_ids, seen)
        before = NodeRecord(_digest(f"id{number}"), key, key[:32], tokens, later=behind)
        yield before


def _digest(of: str) -> str:
    return hashlib.blake2b(of.encode(), digest_size=20).hexdigest()


def _figures(folder: Path, entries: int) -> Row:
    chance = random.Random(0)
    asked = [[_digest(f"id{chance.randrange(entries // 2)}") for _ in range(_IDS)] for _ in range(_LOOKUPS)]
    before = rss_bytes()
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
        if held != [True] * _IDS:
            raise RuntimeError(f"the index of {folder} has lost some of {ids}")
    memory = rss_bytes() - before
    store.close()
    return {"open_s": open_s, "p50_s": percentile(took, 50), "p99_s": percentile(took, 99), "memory_bytes": memory}


if __name__ == "__main__":
    print(json.dumps(_figures(Path(sys.argv[1]), int(sys.argv[2]))))
