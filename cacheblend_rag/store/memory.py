"""The tiers in memory: whole chunks in LRU caches with a byte limit, in RAM and on the devices that compute."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from logging import getLogger

import torch

from cacheblend_rag.codec import (
    Codec,
    PackedKV,
    PackedLayer,
    main_codec,
    make_codec,
    pack_kv,
    repack_layer,
    unpack_layer,
)
from cacheblend_rag.kv import KV, ChunkKV, LayerKV
from cacheblend_rag.store.base import Entry, KVReader, count_of, latest

__all__ = ["DeviceReader", "DeviceTier", "RamReader", "RamTier", "ResidentKV", "Upload", "event_now", "spare_bytes"]

_log = getLogger(__name__)

_DROPPED_KEPT = 4096
_SPARE_SHARE = 8


class LRUCache:
    """Chunk KV in memory by key, at most `limit_bytes`, the least recently used dropped first. Any thread may call any method."""

    name: str

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._has_told = False
        self._evicted: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used_bytes = 0
        self._reserved_bytes = 0
        # Reservations come back here, without the lock, since they may come back from a finalizer.
        self._returned: deque[int] = deque()
        # What was dropped lately for room, or because its time was over.
        self._dropped: deque[str] = deque(maxlen=_DROPPED_KEPT)

    def get(self, key: str, now: float = -math.inf) -> Entry | None:
        """Return what is held under `key` and mark it as recently used; None where it is not held, or has expired by `now`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry.expires_at is not None and entry.expires_at <= now:
                self._drop(key)
                self._dropped.append(key)
                return None
            self._entries.move_to_end(key)
            return entry

    def peek(self, key: str) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def keep(self, key: str, entry: Entry) -> bool:
        """Keep KV, dropping the least recently used for room; return whether it was kept."""
        nbytes = entry.kv.nbytes
        with self._lock:
            self._drop(key)
            if nbytes > self.limit_bytes or not self._make_room(nbytes):
                return False
            self._entries[key] = replace(entry, nbytes=nbytes)
            self._used_bytes += nbytes
            return True

    def prolong(self, key: str, expires_at: float | None, now: float) -> None:
        """Let what is held under `key`, and has not expired by `now`, live until `expires_at` at least; None is for ever."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.is_live(now):
                self._entries[key] = replace(entry, expires_at=latest(entry.expires_at, expires_at))

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for KV that is still being read; return whether there is any."""
        with self._lock:
            if not self._make_room(nbytes):
                return False
            self._reserved_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """End a reservation; takes no lock."""
        self._returned.append(nbytes)

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def evictions(self, tenant: str | None = None) -> int:
        """Return how many were dropped for room, or how many of one tenant's."""
        return count_of(self._evicted, tenant)

    def dropped_lately(self, keys: Iterable[str]) -> set[str]:
        """Return those of the keys that were dropped lately for room, or because their time was over."""
        with self._lock:
            return set(keys).intersection(self._dropped)

    def keys(self, tenant: str | None = None) -> list[str]:
        with self._lock:
            return [key for key, entry in self._entries.items() if tenant in (None, entry.tenant)]

    def tied(self, namespace: str, ids: Collection[str]) -> list[str]:
        """Return the keys of what is tied to one of the ids."""
        with self._lock:
            ties = [(key, entry.tied) for key, entry in self._entries.items() if entry.tied is not None]
        return [key for key, (space, own) in ties if space == namespace and not own.isdisjoint(ids)]

    def nbytes(self, tenant: str | None = None) -> int:
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values() if tenant in (None, entry.tenant))

    def tell_no_room(self, error: BaseException) -> None:
        """Say once that there is less memory than this tier may use."""
        with self._lock:
            is_first, self._has_told = not self._has_told, True
        if is_first:
            _log.warning(
                "KV is not kept in the %s tier: %s; give a smaller %s_bytes than %d (this warning is not repeated)",
                self.name,
                str(error).partition("\n")[0] or type(error).__name__,
                self.name,
                self.limit_bytes,
            )

    def _make_room(self, nbytes: int) -> bool:
        while self._returned:
            self._reserved_bytes -= self._returned.popleft()
        if self._reserved_bytes + nbytes > self.limit_bytes:
            return False
        while self._used_bytes + self._reserved_bytes + nbytes > self.limit_bytes:
            oldest = next(iter(self._entries))
            self._evicted[self._entries[oldest].tenant] += 1
            self._drop(oldest)
            self._dropped.append(oldest)
        return True

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry.nbytes


class RamReader(KVReader):
    """Reads KV that is held in RAM, packed or as it is."""

    tier = "ram"

    def __init__(self, kv: PackedKV | ChunkKV, packed_bytes: int | None = None) -> None:
        packed = kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native"))
        nbytes = packed.nbytes if packed_bytes is None else packed_bytes
        codec = main_codec([layer.codec for layer in packed.layers])
        super().__init__(packed.token_ids, packed.start, packed.context, len(packed.layers), codec, nbytes)
        self._kv = packed

    @property
    def kv_bytes(self) -> int:
        return sum(layer.kv_bytes for layer in self._kv.layers)

    def packed_layer(self, index: int) -> PackedLayer:
        return self._kv.layers[index]

    def layer(self, index: int) -> LayerKV:
        return unpack_layer(self._kv.layers[index])


class RamTier(LRUCache):
    """Chunk KV in RAM, packed by `codec`; page-locked, for CUDA to copy without the processor, if that is wanted and possible."""

    name = "ram"
    kind = PackedKV

    def __init__(self, limit_bytes: int, codec: Codec | None = None, page_locked: bool = False) -> None:
        super().__init__(limit_bytes)
        self.codec = codec or make_codec("native")
        self._page_locked = page_locked

    def place(self, index: int, layer: PackedLayer) -> PackedLayer:
        return repack_layer(layer, self.codec)

    def keep(self, key: str, entry: Entry) -> bool:
        return super().keep(key, replace(entry, kv=self._lock_pages(_owned(pack_kv(entry.kv, self.codec)))))

    def _lock_pages(self, kv: PackedKV) -> PackedKV:
        """Move KV that is not bigger than this tier to page-locked memory, if that is wanted and possible."""
        if not self._page_locked or kv.nbytes > self.limit_bytes:
            return kv
        try:
            return _with_parts(kv, lambda layer: {name: part.pin_memory() for name, part in layer.parts.items()})
        except RuntimeError as error:
            with self._lock:
                is_first, self._page_locked = self._page_locked, False
            if is_first:
                _log.warning(
                    "KV is kept in ordinary memory, since page-locked memory is unavailable: %s (set page_locked=False, or a "
                    "smaller ram_bytes; this warning is not repeated)",
                    str(error).partition("\n")[0],
                )
            return kv


def _owned(kv: PackedKV) -> PackedKV:
    """Copy the tensors that are views into something larger, which would stay in memory uncounted."""
    # All parts of a layer may share one storage, as they do when read from a file.
    return _with_parts(
        kv,
        lambda layer: {
            name: part.clone() if part.untyped_storage().nbytes() > layer.nbytes else part
            for name, part in layer.parts.items()
        },
    )


def _with_parts(kv: PackedKV, parts: Callable[[PackedLayer], dict[str, torch.Tensor]]) -> PackedKV:
    layers = [PackedLayer(layer.codec, layer.key_form, layer.value_form, parts(layer)) for layer in kv.layers]
    return PackedKV(kv.token_ids, kv.start, layers, kv.context)


@dataclass(frozen=True, eq=False)
class Upload:
    """A layer on its way to a device, or there; `done` is recorded after what writes it, None if that was over already."""

    layer: LayerKV
    done: torch.cuda.Event | None

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes

    def receive(self) -> LayerKV:
        """Make the current stream wait for the layer, without waiting here, and hand it over."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.layer.keys.device)
            stream.wait_event(self.done)
            for tensor in self.layer:
                # The memory belongs to the stream that wrote it: without this it could be given out again too early.
                tensor.record_stream(stream)
        return self.layer


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all that a CUDA device has been given in the current stream; None on other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class ResidentKV(KV[Upload]):
    """The KV of one chunk on the devices of its layers, unpacked. It is not written to."""

    __slots__ = ()


class DeviceReader(KVReader):
    """Reads KV that is resident on devices."""

    tier = "device"

    def __init__(self, kv: ResidentKV) -> None:
        super().__init__(kv.token_ids, kv.start, kv.context, len(kv.layers), "native", kv.nbytes)
        self._layers = kv.layers
        self.devices = tuple(upload.layer.keys.device for upload in kv.layers)

    def resident(self, index: int) -> LayerKV:
        return self._layers[index].receive()

    def layer(self, index: int) -> LayerKV:
        return LayerKV(*(tensor.cpu() for tensor in self.resident(index)))


class DeviceTier(LRUCache):
    """Copies of chunk KV, unpacked, each layer on the device that computes it; the last device serves all further layers."""

    name = "device"
    kind = ResidentKV

    def __init__(self, limit_bytes: int, devices: Sequence[torch.device] = (torch.device("cpu"),)) -> None:
        super().__init__(limit_bytes)
        self.devices = tuple(devices)

    def place(self, index: int, layer: LayerKV) -> Upload:
        """Copy one layer, ``(num_kv_heads, seq_len, head_dim)`` on any device, to its own in the current stream."""
        device = self.devices[min(index, len(self.devices) - 1)]
        copied = LayerKV(
            *(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor) for tensor in layer)
        )
        return Upload(copied, event_now(device))


def spare_bytes(devices: Sequence[torch.device]) -> int:
    """Return an eighth of the memory that is free on the CUDA devices among these; 0 where there is none."""
    cuda = {device for device in devices if device.type == "cuda"}
    return sum(torch.cuda.mem_get_info(device)[0] for device in cuda) // _SPARE_SHARE
