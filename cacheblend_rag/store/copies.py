"""The copies of KV in this process's memory: in RAM and on the devices that compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.device import DeviceReader, DeviceTier, ResidentKV
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.rise import RisingReader
from cacheblend_rag.store.shelf import Shelf

__all__ = ["Copies"]


class Copies:
    """RAM and the device tier, and of what they hold when it expires and whose it is.

    Nothing is on a device that is not in a slower tier too. Where RAM is the slowest, the device follows it at once; where there
    is a disk, what is dropped there is dropped here by `drop`.

    Parameters
    ----------
    ram : RamTier
        The memory.
    device : DeviceTier
        The devices' memory.
    clock : StoreClock
        What tells when KV expires.
    ram_is_all : bool
        Whether there is no disk below.
    """

    def __init__(self, ram: RamTier, device: DeviceTier, clock: StoreClock, ram_is_all: bool) -> None:
        self.ram = ram
        self.device = device
        self._clock = clock
        self._ram_is_all = ram_is_all
        if ram_is_all:
            ram.on_drop = lambda key: device.drop([key])
        # When it expires, and whose it is, where it does and is somebody's.
        self._expiry: dict[str, float] = {}
        self._owner: dict[str, str] = {}

    def open(self, key: str, is_held: Callable[[str], bool]) -> KVReader | None:
        """Return a reader of the fastest copy under `key`, or None.

        Parameters
        ----------
        key : str
            The key.
        is_held : callable
            Whether a slower tier holds a key; asked before a copy on a device is shown to others.
        """
        resident = self.device.get(key)
        packed = None if resident is not None and not self._ram_is_all else self.ram.get(key)
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
        return self.rising(key, reader, reader.kv_bytes, is_held)

    def rising(
        self,
        key: str,
        reader: KVReader,
        kv_bytes: int,
        is_held: Callable[[str], bool],
        note: Callable[[], None] | None = None,
    ) -> KVReader:
        """Return `reader`, on its way up to the device if its `kv_bytes` fit there.

        Parameters
        ----------
        key : str
            Its key.
        reader : KVReader
            Reads a slower tier.
        kv_bytes : int
            Size of all layers as they are unpacked.
        is_held : callable
            See `open`.
        note : callable, optional
            Calls `note`, for what RAM need not hold.
        """
        if kv_bytes > self.device.limit_bytes:
            return reader
        return RisingReader(reader, self.device, kv_bytes, partial(self._keep_on_device, key, is_held, note))

    def put(self, key: str, kv: ChunkKV | PackedKV, hidden: bool = False) -> bool:
        """Keep KV in RAM; see `RamTier.put`."""
        return self.ram.put(key, kv, hidden)

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

    def has_expired(self, key: str) -> bool:
        """Return whether the copies under a key are too old to be used."""
        expires_at = self._expiry.get(key)
        return expires_at is not None and expires_at <= self._clock.now()

    def drop(self, keys: Iterable[str]) -> None:
        """Forget all copies under these keys."""
        keys = list(keys)
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self.ram.drop(keys)
        self.device.drop(keys)

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

    def _keep_on_device(
        self, key: str, is_held: Callable[[str], bool], note: Callable[[], None] | None, kv: ResidentKV
    ) -> None:
        """Keep a copy on its device, which nobody sees before it is clear that slower tiers have not dropped it meanwhile."""
        if note is not None:
            note()
        if not self.device.keep(key, kv, hidden=True):
            return
        if self.ram.shows(key) or is_held(key):
            self.device.reveal(key)
        else:
            self.device.drop([key])
