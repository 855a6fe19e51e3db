"""From slower tiers to faster ones: a reader that keeps what it has read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any, Generic, TypeVar

import torch

from cacheblend_rag.codec import PackedKV, PackedLayer, repack_layer, unpack_layer
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.device import DeviceTier, ResidentKV, Upload
from cacheblend_rag.store.ram import LRUCache, RamReader, RamTier

__all__ = ["PromotingReader"]

_log = getLogger(__name__)

Layer = TypeVar("Layer")


class _Promotion(Generic[Layer]):
    """The layers of one chunk that were read so far, and the room that a faster tier keeps for all of them."""

    def __init__(self, tier: LRUCache[Any], nbytes: int, num_layers: int) -> None:
        self._tier = tier
        self._nbytes = nbytes
        self._num_layers = num_layers
        self._lock = threading.Lock()
        self._began = False
        self._layers: dict[int, Layer] | None = None

    def __del__(self) -> None:
        # Takes no lock, being a finalizer.
        if self._layers is not None:
            self._tier.give_back(self._nbytes)

    def begin(self) -> bool:
        """Reserve room, the first time; return whether there was any and the chunk is still on its way."""
        with self._lock:
            if not self._began:
                self._began = True
                if self._tier.reserve(self._nbytes):
                    self._layers = {}
            return self._layers is not None

    def get(self, index: int) -> Layer | None:
        with self._lock:
            return None if self._layers is None else self._layers.get(index)

    def add(self, index: int, layer: Layer) -> bool:
        """Hold a layer; return whether it was the last one, or the only one wanting."""
        with self._lock:
            if self._layers is None:
                return False
            self._layers[index] = layer
            return index == self._num_layers - 1 or len(self._layers) == self._num_layers

    def end(self) -> None:
        """Give the room back, if that is still to be done."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is not None:
            self._tier.give_back(self._nbytes)

    def complete(self, read: Callable[[int], Layer]) -> Sequence[Layer] | None:
        """Return all layers, or None if most are wanting; the few that nobody asked for, their KV being computed, are read."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is None:
            return None
        try:
            missing = [number for number in range(self._num_layers) if number not in layers]
            if len(missing) * 2 > self._num_layers:
                return None
            layers.update([(number, read(number)) for number in missing])
            return [layers[number] for number in range(self._num_layers)]
        except ChunkReadError as error:
            _log.warning("%s", error)
            return None
        finally:
            self._tier.give_back(self._nbytes)


class PromotingReader(KVReader):
    """Reads a file or KV in RAM, and hands it to RAM when its last layer was read, and to the device tier in `finish`.

    RAM keeps room for it from the beginning on, the device tier from the first layer that is kept: by then all chunks of a
    prompt are opened, and none that it needs has to be read because it had to go.
    """

    def __init__(
        self,
        source: ChunkFile | RamReader,
        *,
        ram: RamTier | None = None,
        to_ram: Callable[[PackedKV], None] | None = None,
        device: DeviceTier | None = None,
        to_device: Callable[[ResidentKV], None] | None = None,
    ) -> None:
        super().__init__(
            source.token_ids, source.start, source.context, source.num_layers, source.codec, source.packed_bytes
        )
        self.tier = source.tier
        self.promotes_to_device = device is not None
        self._source = source
        self._ram, self._to_ram = ram, to_ram
        self._device, self._to_device = device, to_device
        self._lock = threading.Lock()
        self._reading = 0
        self._ends = False
        self._to_ram_layers: _Promotion[PackedLayer] | None = None
        if ram is not None:
            # Packing never makes KV larger, unpacking may.
            nbytes = source.kv_bytes if ram.codec.name == "native" else source.packed_bytes
            self._to_ram_layers = _Promotion(ram, nbytes, self.num_layers)
            self._to_ram_layers.begin()
        self._uploads: _Promotion[Upload] | None = None
        if device is not None:
            self._uploads = _Promotion(device, source.kv_bytes, self.num_layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once where it goes to RAM; the caller must not write to it."""
        rising, ram = self._to_ram_layers, self._ram
        if rising is None or ram is None or not rising.begin():
            return self._source.layer(index)
        packed = rising.get(index)
        if packed is None:
            with self._lock:
                self._reading += 1
            try:
                packed = repack_layer(self._source.packed_layer(index), ram.codec)
            except BaseException:
                with self._lock:
                    self._reading -= 1
                raise
            with self._lock:
                self._reading -= 1
                # The last layer may be read before others are that another thread has begun.
                self._ends = rising.add(index, packed) or self._ends
                is_over = self._ends and not self._reading
            if is_over:
                self._enter_ram(rising)
        return unpack_layer(packed)

    def keep(self, index: int, layer: LayerKV) -> None:
        if self._device is None or self._uploads is None or not self._uploads.begin():
            return
        try:
            self._uploads.add(index, self._device.place(index, layer))
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._uploads.end()
            self._device.tell_no_room(error)

    def finish(self) -> None:
        device, uploads = self._device, self._uploads
        if device is None or uploads is None:
            return
        try:
            layers = uploads.complete(lambda number: device.place(number, self.layer(number)))
        except (torch.OutOfMemoryError, MemoryError) as error:
            device.tell_no_room(error)
            return
        if layers is not None and self._to_device is not None:
            self._to_device(ResidentKV(self.token_ids, self.start, layers, self.context))

    def _enter_ram(self, rising: _Promotion[PackedLayer]) -> None:
        layers = rising.complete(self._source.packed_layer)
        if layers is not None and self._to_ram is not None:
            self._to_ram(PackedKV(self.token_ids, self.start, tuple(layers), self.context))
