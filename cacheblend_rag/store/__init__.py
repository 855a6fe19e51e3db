"""The chunk KV store: RAM over a folder on disk, and the names of the chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.codec import make_codec
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.store.background import Offsite
from cacheblend_rag.store.base import (
    Fate,
    KVReader,
    Later,
    NameChanges,
    NodeRecord,
    StoreStats,
)
from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.kvstore import KVStore
from cacheblend_rag.store.memory import DeviceTier, RamTier
from cacheblend_rag.store.names import Names, NamesSource
from cacheblend_rag.store.remote import RemoteTier, redis_url, shown_url
from cacheblend_rag.store.tiers import Tiers

__all__ = [
    "CheckReport",
    "Fate",
    "GarbageReport",
    "KVReader",
    "KVStore",
    "Later",
    "NameChanges",
    "Names",
    "NodeRecord",
    "StoreStats",
    "check_store",
    "collect_garbage",
    "open_remote",
    "open_store",
]


# Entries dropped in one transaction: others wait no longer than that takes.
_AT_ONCE = 500


def open_store(
    location: str | Path | None,
    ram_bytes: int,
    disk_bytes: int | None = None,
    *,
    ram_codec: str = "native",
    disk_codec: str = "native",
    write_back_bytes: int = 0,
    clock: Callable[[], float] | None = None,
    remote: str | RemoteTier | None = None,
    names: str | NamesSource | None = None,
    device_bytes: int = 0,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
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
        Maximum bytes of KV in RAM; with a folder, RAM holds copies of what was used last.
    disk_bytes : int, optional
        Maximum bytes of KV on disk; by default half of the disk's free space, what the store holds counted as free.
    ram_codec, disk_codec : str
        How KV is packed in RAM and on disk (`cacheblend_rag.codec.codec_names`). KV already stored is read whatever its codec.
    write_back_bytes : int
        Maximum bytes of KV of misses that wait in RAM, beside `ram_bytes`, to be written; 0 writes them at once.
    clock : callable
        Returns the time in seconds, by which KV expires.
    remote : str or RemoteTier, optional
        A remote tier below RAM and disk, or its URL (`open_remote`). It gets a copy of what is stored, packed as on disk, and
        keeps it when there is no more room here; machines that share it share the KV.
    names : str or NamesSource, optional
        The names that machines share, or their URL, for whose scheme a package such as cacheblend-ray is installed.
    device_bytes : int
        Maximum bytes of KV kept unpacked in the memory of the devices that compute, all of them together.
    devices : sequence of torch.device
        The device of each layer; the last one also serves all further layers.
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
        If the folder is not a store and is not writable. One that holds a store is opened for reading.
    StoreError
        If the store cannot be opened: it is damaged, out of reach, locked for too long, or its disk is full.
    """
    if not isinstance(lock_timeout_s, int | float) or not 0 <= lock_timeout_s <= 10**6:
        raise ConfigError(f"lock_timeout_s={lock_timeout_s!r} must be a number of seconds from 0 upwards")
    ram, codec = RamTier(ram_bytes, make_codec(ram_codec), page_locked), make_codec(disk_codec)
    device = DeviceTier(device_bytes, devices)
    tier = open_remote(remote) if isinstance(remote, str) else remote
    offsite = None if tier is None else Offsite(tier, codec)
    source = _names_at(names) if isinstance(names, str) else names
    disk = None
    if location is not None:
        disk = DiskTier(Path(location).expanduser(), disk_bytes, codec, clock, False, lock_timeout_s)
    store = KVStore(Tiers(clock or time.time, device, ram, disk), offsite, write_back_bytes)
    try:
        if source is not None:
            store.follow(source)
        elif store.follows_others:
            raise StoreError(
                f"the ids in {store.path} are shared with other machines, and out of date without their server; give its address "
                "(EngineConfig(names=...), or CACHEBLEND_NAMES in the environment)"
            )
    except BaseException:
        store.close()
        raise
    return store


def _names_at(url: str) -> NamesSource:
    """Return the shared names at a URL, which an installed package opens."""
    scheme = url.partition(":")[0]
    for entry in entry_points(group="cacheblend_rag.names", name=scheme.partition("+")[0]):
        source: NamesSource = entry.load()(url)
        return source
    raise ConfigError(
        f"no installed package shares ids at {scheme}://; a database (postgresql+psycopg://user@host/database, or "
        "sqlite:////folder/names.sqlite) needs cacheblend-ray: pip install 'cacheblend-rag[ray]'"
    )


def open_remote(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 1.0,
    read_timeout_s: float = 5.0,
    ttl_s: float | None = None,
) -> RemoteTier:
    """Make the remote tier that a URL names. Nothing is connected to until it is used.

    Parameters
    ----------
    url : str
        ``redis://user:password@host:6379/0``, ``valkey://…``, with TLS ``rediss://…`` or ``valkeys://…`` (extra ``redis``); or
        the folder of any fsspec filesystem (extra ``fsspec``): ``s3://bucket/prefix`` (extra ``s3``),
        ``file:///mnt/share/kv``, ``memory://name``.
    storage_options : mapping, optional
        What the fsspec filesystem is made with: credentials, ``endpoint_url``.
    connect_timeout_s, read_timeout_s : float
        How long to wait for a connection, and for an answer.
    ttl_s : float, optional
        Seconds after which an entry expires from when it was put last; Redis and Valkey only.

    Returns
    -------
    RemoteTier
        The tier.

    Raises
    ------
    ConfigError
        If the URL or a setting has no meaning, or a package is missing; the message names the extra to install.
    """
    location, limits = shown_url(url), (connect_timeout_s, read_timeout_s)
    for name, value in (("connect_timeout_s", limits[0]), ("read_timeout_s", limits[1]), ("ttl_s", ttl_s)):
        if not (isinstance(value, int | float) and 0 < value < math.inf) and not (name == "ttl_s" and value is None):
            raise ConfigError(f"{name}={value!r} must be a positive number of seconds")
    if (server := redis_url(url)) is not None:
        if storage_options:
            raise ConfigError(f"storage_options are for fsspec filesystems; {location} is not one")
        with needs_extra("redis", location):
            from cacheblend_rag.store.remote.redis import RedisTier
        try:
            return RedisTier(server, location, *limits, ttl_s)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{location} is not a Redis URL; give one like redis://user:password@host:6379/0"
            ) from None
    if ttl_s is not None:
        raise ConfigError(f"ttl_s={ttl_s}: files in {location} do not expire; give the bucket a lifecycle rule")
    with needs_extra("s3" if url.startswith("s3") else "fsspec", location):
        from cacheblend_rag.store.remote.fsspec import FsspecTier

        try:
            return FsspecTier(url, location, *limits, dict(storage_options or {}))
        except ImportError:
            raise
        except Exception as error:
            # What a filesystem says of its options may quote them.
            raise ConfigError(
                f"fsspec cannot open {location} with the options {sorted(storage_options or {})} ({type(error).__name__}); "
                "fsspec.available_protocols() lists what may come before ://"
            ) from None


@dataclass(slots=True)
class CheckReport:
    """What a check of a store found. Problems are no danger to answers: damaged or missing KV is a miss when it is met."""

    entries: int = 0
    bytes: int = 0
    names: int = 0
    problems: list[str] = field(default_factory=list)
    repaired: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def check_store(location: str | Path, repair: bool = False) -> CheckReport:
    """Read and verify everything in a store folder, which others may use; with `repair` drop KV that is damaged."""
    report = CheckReport()
    _examine(location, report)
    if repair and report.problems:
        with existing_store(location) as tier:
            for key, _ in tier.index.entries():
                if tier.flaw(key, every_byte=True) is not None:
                    tier.discard(key)
        report.repaired = True
    return report


def _examine(location: str | Path, report: CheckReport) -> None:
    with existing_store(location, read_only=True) as tier:
        tier.index.check()
        for key, entry in tier.index.entries():
            flaw = tier.flaw(key, every_byte=True)
            if flaw is None:
                report.entries += 1
                report.bytes += entry.nbytes
            # Otherwise another process has dropped it meanwhile.
            elif tier.index.entry(key) is not None:
                report.problems.append(flaw)
        for path in tier.folder.strangers():
            report.problems.append(f"{path} does not belong to the store; move it elsewhere")
        report.names = tier.index.share()[2]


@dataclass(slots=True)
class GarbageReport:
    """What was removed: entries whose time was over, files that belonged to no entry, and their bytes."""

    expired: int = 0
    orphans: int = 0
    freed_bytes: int = 0


def collect_garbage(location: str | Path, clock: Callable[[], float] | None = None) -> GarbageReport:
    """Remove what expired or belongs to nothing; others may use the store."""
    report = GarbageReport()
    with existing_store(location, clock=clock) as tier:
        now, freed = tier.clock(), tier.index.share()[1]
        while keys := tier.index.expired(now, _AT_ONCE):
            report.expired += len(tier.with_room(partial(tier.index.drop, keys)).keys)
        report.freed_bytes = freed - tier.index.share()[1]
        for key, nbytes in tier.folder.files():
            # A file has its entry before others see it, or has none because its writer was killed.
            if tier.index.entry(key) is None and tier.remove_orphan(key):
                report.orphans += 1
                report.freed_bytes += nbytes
        tier.index.tidy()
    return report
