"""The chunk KV store: RAM over a folder on disk, and the names of the chunks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from cacheblend_rag.codec import make_codec
from cacheblend_rag.errors import ConfigError, StoreError, how_to_install
from cacheblend_rag.store.index import is_store
from cacheblend_rag.store.kvstore import KVStore, StoreStats
from cacheblend_rag.store.memory import KVReader, RamReader, RamTier, part_of
from cacheblend_rag.store.names import Later, NameChanges, Names, NamesSource, NodeRecord
from cacheblend_rag.store.remote import RemoteTier, open_remote
from cacheblend_rag.store.tiers import DiskTier

__all__ = [
    "CheckReport",
    "KVReader",
    "KVStore",
    "Later",
    "NameChanges",
    "Names",
    "NodeRecord",
    "RamReader",
    "StoreStats",
    "check_store",
    "open_remote",
    "open_store",
    "part_of",
]


def open_store(
    location: str | Path | None,
    ram_bytes: int,
    disk_bytes: int | None = None,
    *,
    ram_codec: str = "native",
    disk_codec: str = "native",
    remote: str | RemoteTier | None = None,
    names: str | NamesSource | None = None,
    page_locked: bool = False,
    lock_timeout_s: float = 60.0,
) -> KVStore:
    """Open a chunk KV store, making it if there is none.

    Parameters
    ----------
    location : str or Path, optional
        A folder on a local disk, which any number of processes may have open. Without one, the store lives in RAM and ends with
        the process.
    ram_bytes : int
        Maximum bytes of KV in RAM; with a folder, RAM holds copies of what was used last, and misses until they are written.
    disk_bytes : int, optional
        Maximum bytes of KV on disk; by default half of the disk's free space, what the store holds counted as free.
    ram_codec, disk_codec : str
        How KV is packed in RAM and on disk (`cacheblend_rag.codec.codec_names`). KV already stored is read whatever its codec.
    remote : str or RemoteTier, optional
        A remote tier below RAM and disk, or its URL (`open_remote`). It gets a copy of what is stored, packed as on disk, and
        keeps it when there is no more room here; machines that share it share the KV.
    names : str or NamesSource, optional
        The names that machines share, or their URL, for whose scheme a package such as cacheblend-ray is installed.
    page_locked : bool
        Whether RAM holds KV in page-locked memory, from which a CUDA device copies without the processor.
    lock_timeout_s : float
        How long what changes the store waits for another process that writes; after that it is an error.

    Returns
    -------
    KVStore
        The store.

    Raises
    ------
    ConfigError
        If a codec is unknown, `lock_timeout_s` is not a number of seconds, or no package shares names at such a URL.
    StoreFormatError
        If the folder is anything but a store or empty, or in a format that this version does not read. Nothing is changed in it.
    StoreReadOnlyError
        If the folder is not writable.
    StoreError
        If the store cannot be opened: it is damaged, out of reach, locked for too long, or its disk is full.
    """
    if not isinstance(lock_timeout_s, int | float) or not 0 <= lock_timeout_s <= 10**6:
        raise ConfigError(f"lock_timeout_s={lock_timeout_s!r} must be a number of seconds from 0 upwards")
    ram, codec = RamTier(ram_bytes, make_codec(ram_codec), page_locked), make_codec(disk_codec)
    tier = open_remote(remote) if isinstance(remote, str) else remote
    source = _names_at(names) if isinstance(names, str) else names
    disk = None
    if location is not None:
        disk = DiskTier(Path(location).expanduser(), disk_bytes, codec, lock_timeout_s)
    return KVStore(ram, disk, codec, tier, source)


def _names_at(url: str) -> NamesSource:
    """Return the shared names at a URL, which an installed package opens."""
    scheme = url.partition(":")[0]
    for entry in entry_points(group="cacheblend_rag.names", name=scheme.partition("+")[0]):
        source: NamesSource = entry.load()(url)
        return source
    raise ConfigError(
        f"no installed package shares ids at {scheme}://; a database (postgresql+psycopg://user@host/database, or "
        f"sqlite:////folder/names.sqlite) needs cacheblend-ray: {how_to_install('ray')}"
    )


@dataclass(slots=True)
class CheckReport:
    """What a check of a store found. Problems are no danger to answers: damaged or missing KV is a miss when it is met."""

    entries: int = 0
    bytes: int = 0
    names: int = 0
    problems: list[str] = field(default_factory=list)
    repaired: bool = False
    freed_bytes: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def check_store(location: str | Path, repair: bool = False) -> CheckReport:
    """Read and verify everything in a store folder, which others may use.

    With `repair` KV that is damaged is dropped, files that belong to no entry are removed.
    """
    report, path = CheckReport(), Path(location).expanduser()
    if not path.exists() or not is_store(path):
        raise StoreError(f"there is no store in {path}; give the folder of one")
    with closing(DiskTier(path)) as tier:
        tier.index.check()
        for key, nbytes in tier.index.entries():
            flaw = tier.flaw(key, every_byte=True)
            if flaw is None:
                report.entries += 1
                report.bytes += nbytes
            # Otherwise another process has dropped it meanwhile.
            elif tier.with_room(partial(tier.drop_damaged, key)) if repair else tier.index.holds([key])[0]:
                report.problems.append(flaw)
                report.freed_bytes += nbytes if repair else 0
        for file, own in tier.files():
            if own is None:
                report.problems.append(f"{file} does not belong to the store; move it elsewhere")
            # A file has its entry before others see it, or has none because its writer was killed.
            elif repair and not tier.index.holds([own])[0]:
                report.freed_bytes += tier.remove_orphan(own) or 0
        report.names = tier.index.share()[2]
        report.repaired = repair and bool(report.problems)
    return report
