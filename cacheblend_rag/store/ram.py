"""The RAM tier: whole chunks, least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import replace

from cacheblend_rag.codec import Codec, PackedKV, PackedLayer, make_codec, pack_kv, repack_layer, unpack_layer
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["RamReader", "RamTier"]


class RamReader:
    """Reads KV that is held in RAM.

    Parameters
    ----------
    kv : PackedKV or ChunkKV
        The KV, packed or as it is.
    """

    tier = "ram"

    def __init__(self, kv: PackedKV | ChunkKV) -> None:
        self._kv = kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native"))

    @property
    def codec(self) -> str:
        """How its layers are packed, most of them if not all alike."""
        return self._kv.codec

    @property
    def packed_bytes(self) -> int:
        """Size of all layers as they are packed."""
        return self._kv.nbytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._kv.token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._kv.start

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._kv.layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, unpacked; the caller must not write to it."""
        return unpack_layer(self._kv.layers[index])


class RamTier:
    """Chunk KV in memory, at most so many bytes of it.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of KV held, as it is packed, reservations included. An entry that is bigger than this is not kept.
    codec : Codec, optional
        How KV is kept; by default as it is.
    """

    def __init__(self, limit_bytes: int, codec: Codec | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.codec = make_codec("native") if codec is None else codec
        self._lock = ForkSafeLock()
        self._entries: OrderedDict[str, PackedKV] = OrderedDict()
        self._used_bytes = 0
        self._reserved_bytes = 0
        # Reservations come back here, without the lock, since they may come back from a finalizer.
        self._returned: deque[int] = deque()
        self._evictions = 0
        self._pinned: set[str] = set()
        self._hidden: set[str] = set()

    def get(self, key: str) -> PackedKV | None:
        """Return the KV under `key` and mark it as recently used, or None."""
        with self._lock:
            kv = None if key in self._hidden else self._entries.get(key)
            if kv is not None:
                self._entries.move_to_end(key)
            return kv

    def pack(self, kv: ChunkKV | PackedKV) -> PackedKV:
        """Return `kv` as this tier keeps it."""
        return pack_kv(kv, self.codec)

    def put(self, key: str, kv: ChunkKV | PackedKV, hidden: bool = False) -> bool:
        """Keep `kv`, packed, dropping the least recently used for room; return whether it was kept.

        With `hidden` nobody gets it until `reveal` is called, unless it is dropped before.
        """
        kv = _owned(self.pack(kv))
        with self._lock:
            self._drop(key)
            if kv.nbytes > self.limit_bytes or not self._make_room(kv.nbytes):
                return False
            self._entries[key] = kv
            if hidden:
                self._hidden.add(key)
            self._used_bytes += kv.nbytes
            return True

    def repack(self, layer: PackedLayer) -> PackedLayer:
        """Return one layer as this tier keeps it."""
        return repack_layer(layer, self.codec)

    def reveal(self, key: str) -> None:
        """Let others get what was put hidden."""
        with self._lock:
            self._hidden.discard(key)

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for an entry that is still being read; return whether there is any."""
        with self._lock:
            if not self._make_room(nbytes):
                return False
            self._reserved_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """End a reservation; takes no lock."""
        self._returned.append(nbytes)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these entries."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def pin(self, keys: Iterable[str]) -> None:
        """Never drop these for room, once they are held."""
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let these be dropped for room again."""
        with self._lock:
            self._pinned.difference_update(keys)

    def pinned(self) -> list[str]:
        """Return the keys that are never dropped for room."""
        with self._lock:
            return sorted(self._pinned)

    def nbytes(self, keys: Iterable[str]) -> int:
        """Return the bytes held under these keys."""
        with self._lock:
            return sum(self._entries[key].nbytes for key in keys if key in self._entries)

    def clear(self) -> None:
        """Forget every entry, and what was pinned."""
        with self._lock:
            self._pinned.clear()
            self._hidden.clear()
            self._entries.clear()
            self._used_bytes = 0

    def keys(self) -> list[str]:
        """Return the keys held, least recently used first."""
        with self._lock:
            return list(self._entries)

    def holds(self, key: str) -> bool:
        """Return whether `key` is held, without marking it as used."""
        with self._lock:
            return key in self._entries

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of KV held."""
        with self._lock:
            return self._used_bytes

    @property
    def evictions(self) -> int:
        """Entries dropped for room."""
        return self._evictions

    def _make_room(self, nbytes: int) -> bool:
        while self._returned:
            self._reserved_bytes -= self._returned.popleft()
        kept_bytes = sum(self._entries[key].nbytes for key in self._pinned if key in self._entries)
        if kept_bytes + self._reserved_bytes + nbytes > self.limit_bytes:
            return False
        while self._used_bytes + self._reserved_bytes + nbytes > self.limit_bytes:
            self._drop(next(key for key in self._entries if key not in self._pinned))
            self._evictions += 1
        return True

    def _drop(self, key: str) -> None:
        kv = self._entries.pop(key, None)
        self._hidden.discard(key)
        if kv is not None:
            self._used_bytes -= kv.nbytes


def _owned(kv: PackedKV) -> PackedKV:
    """Copy the tensors that are views into something larger, which would stay in memory uncounted."""

    def compact(layer: PackedLayer) -> PackedLayer:
        # All parts of a layer may share one storage, as they do when read from a file.
        room = layer.nbytes
        if all(part.untyped_storage().nbytes() <= room for part in layer.parts.values()):
            return layer
        parts = {
            name: part.clone() if part.untyped_storage().nbytes() > room else part for name, part in layer.parts.items()
        }
        return replace(layer, parts=parts)

    return PackedKV(kv.token_ids, kv.start, tuple(map(compact, kv.layers)))
