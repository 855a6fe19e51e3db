"""The copies of KV in this process's memory: in RAM and on the devices that compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.device import DeviceReader, DeviceTier, ResidentKV
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.names import Names
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.rise import RisingReader
from cacheblend_rag.store.shelf import Shelf

__all__ = ["Copies"]


class Copies:
    """RAM and the device tier, and of what they hold when it expires and whose it is.

    Nothing is on a device that is not in a slower tier too. Where RAM is the slowest, the device follows it at once. With a disk,
    what is kept here is checked against its index once it is here, and what is dropped there is dropped here by `drop`, or
    noticed by `follow`.

    Parameters
    ----------
    ram : RamTier
        The memory.
    device : DeviceTier
        The devices' memory.
    clock : StoreClock
        What tells when KV expires.
    names : Names
        The names, some of them pinned.
    disk : DiskTier, optional
        The tier below, if there is one.
    """

    def __init__(
        self, ram: RamTier, device: DeviceTier, clock: StoreClock, names: Names, disk: DiskTier | None = None
    ) -> None:
        self.ram = ram
        self.device = device
        self._clock = clock
        self._names = names
        self._disk = disk
        self._closed = False
        self._deletions_seen = disk.index.deletions() if disk else 0
        if disk is None:
            ram.on_drop = lambda key: device.drop([key])
        # When it expires, and whose it is, where it does and is somebody's.
        self._expiry: dict[str, float] = {}
        self._owner: dict[str, str] = {}

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the fastest copy under `key`, or None."""
        resident = self.device.get(key)
        packed = None if resident is not None and self._disk else self.ram.get(key)
        if resident is None and packed is None:
            return None
        if self.has_expired(key):
            # On disk it may have been given a longer life.
            self.drop([key])
            return None
        if resident is not None:
            return DeviceReader(resident)
        assert packed is not None
        reader = RamReader(packed)
        return self.rising(key, reader, reader.kv_bytes)

    def rising(self, key: str, reader: KVReader, kv_bytes: int, note: Callable[[], None] | None = None) -> KVReader:
        """Return `reader`, on its way up to the device if its `kv_bytes` fit there.

        Parameters
        ----------
        key : str
            Its key.
        reader : KVReader
            Reads a slower tier.
        kv_bytes : int
            Size of all layers as they are unpacked.
        note : callable, optional
            Calls `note`, for what RAM need not hold.
        """
        if kv_bytes > self.device.limit_bytes:
            return reader
        return RisingReader(reader, self.device, kv_bytes, partial(self._keep_on_device, key, note))

    def keep(self, key: str, kv: ChunkKV | PackedKV, tenant: str, expires_at: float | None) -> None:
        """Keep in RAM what is on disk, which nobody sees before it is clear that it was not dropped there meanwhile."""
        self.note(key, tenant, expires_at)
        self.ram.put(key, kv, hidden=True)
        # The disk's own word: what a remote tier holds does not count, and is not worth a round trip.
        if self._is_on_disk(key):
            try:
                self.ram.pin(self._names.pinned([key]))
                self.ram.reveal(key)
                return
            except StoreError:
                # Closed between the two.
                pass
        self.ram.drop([key])

    def note(self, key: str, tenant: str, expires_at: float | None) -> None:
        """Note when the copies under a key expire, and whose they are."""
        self._expiry.pop(key, None)
        self._owner.pop(key, None)
        if expires_at is not None:
            self._expiry[key] = expires_at
        if tenant:
            self._owner[key] = tenant
        notes: dict[str, Any]
        for notes in (self._expiry, self._owner):
            if len(notes) > 2 * (len(self.ram) + len(self.device)) + 1000:
                for gone in set(list(notes)).difference(self.ram.keys(), self.device.keys(), [key]):
                    notes.pop(gone, None)

    def prolong(self, key: str, expires_at: float | None) -> None:
        """Let the copies under a key live until then at least, for ever if that is None."""
        until = self._expiry.get(key)
        if until is not None and expires_at is None:
            self._expiry.pop(key, None)
        elif until is not None and expires_at is not None:
            self._expiry[key] = max(until, expires_at)

    def expires_at(self, key: str) -> float | None:
        """Return when the copies under a key are too old to be used, by the store's time, or None if never."""
        return self._expiry.get(key)

    def has_expired(self, key: str) -> bool:
        """Return whether the copies under a key are too old to be used."""
        expires_at = self.expires_at(key)
        return expires_at is not None and expires_at <= self._clock.now()

    def drop(self, keys: Iterable[str]) -> None:
        """Forget all copies under these keys."""
        keys = list(keys)
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self.ram.drop(keys)
        self.device.drop(keys)

    def follow(self) -> None:
        """Drop what other processes have deleted from the folder."""
        if not self._disk:
            return
        index, seen = self._disk.index, self._deletions_seen
        now = index.deletions()
        if now == seen:
            return
        gone = index.deleted_since(seen)
        if gone is None:
            held = [*self.ram.keys(), *self.device.keys()]
            there = index.holds(held, self._clock.now())
            gone = [key for key, held_on_disk in zip(held, there, strict=True) if not held_on_disk]
        self.drop(gone)
        self.unpin()
        self._deletions_seen = now

    def unpin(self) -> None:
        """Let go in RAM of what no pinned name leads to any more."""
        pinned = self.ram.pinned()
        if pinned:
            self.ram.unpin(set(pinned).difference(self._names.pinned(pinned)))

    def close(self) -> None:
        """Forget everything, and keep nothing that is still on its way."""
        self._closed = True
        self.clear()

    def clear(self, tenant: str | None = None) -> None:
        """Forget everything, or what is one tenant's."""
        if tenant is not None:
            self.drop([*self.owned(self.ram, tenant), *self.owned(self.device, tenant)])
            return
        self.ram.clear()
        self.device.clear()

    def owned(self, shelf: Shelf[Any], tenant: str | None) -> list[str]:
        """Return the keys on a shelf that are a tenant's, or all."""
        keys = shelf.keys()
        return keys if tenant is None else [key for key in keys if self._owner.get(key, "") == tenant]

    def nbytes(self, shelf: Shelf[Any], tenant: str | None) -> int:
        """Return the bytes on a shelf that are a tenant's, or all."""
        return shelf.used_bytes if tenant is None else shelf.nbytes(self.owned(shelf, tenant))

    def _keep_on_device(self, key: str, note: Callable[[], None] | None, kv: ResidentKV) -> None:
        """Keep a copy on its device, which nobody sees before it is clear that slower tiers have not dropped it meanwhile."""
        if note is not None:
            note()
        if not self.device.keep(key, kv, hidden=True):
            return
        if self.ram.shows(key) or self._is_on_disk(key):
            self.device.reveal(key)
        else:
            self.device.drop([key])

    def _is_on_disk(self, key: str) -> bool:
        """Return whether a copy of what is under `key` may be kept: a reader may come to its end when all is over."""
        try:
            return not self._closed and self._disk is not None and self._disk.holds([key])[0]
        except StoreError:
            return False
