"""The device tier: whole chunks in the memory of the devices that compute; and a reader that promotes KV to it and to RAM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Generic, TypeVar

import torch

from cacheblend_rag.codec import PackedKV, PackedLayer, repack_layer, unpack_layer
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import KV, ChunkKV, LayerKV
from cacheblend_rag.store.base import KVReader, OpenProbe
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.ram import LRUCache, RamReader, RamTier

__all__ = ["DeviceReader", "DeviceTier", "PromotingReader", "ResidentKV", "Upload", "device_probe", "spare_bytes"]

_log = getLogger(__name__)

Layer = TypeVar("Layer")

_SPARE_SHARE = 8


@dataclass(frozen=True, eq=False)
class Upload:
    """A layer on its way to a device, or there; `done` is recorded after what writes it, None if that was over already."""

    layer: LayerKV
    done: torch.cuda.Event | None

    @property
    def nbytes(self) -> int:
        """Size of both tensors in bytes."""
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


class ResidentKV(KV[Upload]):
    """The KV of one chunk on the devices of its layers, unpacked. Nobody writes to it."""

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


class DeviceTier(LRUCache[ResidentKV]):
    """Chunk KV unpacked, each layer on the device that computes it, up to a given number of bytes on all devices together.

    It holds copies only, of what slower tiers hold too. Pins do not reach it: what is pinned is never lost, but no device need
    keep it.

    Parameters
    ----------
    limit_bytes : int
        Maximum bytes of KV held, reservations included; with 0 nothing is.
    devices : sequence of torch.device
        The device of each layer; the last one also serves all further layers.
    """

    def __init__(self, limit_bytes: int, devices: Sequence[torch.device] = (torch.device("cpu"),)) -> None:
        super().__init__(limit_bytes)
        self._devices = tuple(devices)
        self._warned = False

    def place(self, index: int, layer: LayerKV) -> Upload:
        """Copy one layer, ``(num_kv_heads, seq_len, head_dim)`` on any device, to its own in the current stream."""
        device = self._devices[min(index, len(self._devices) - 1)]
        copied = LayerKV(
            *(torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor) for tensor in layer)
        )
        if device.type != "cuda":
            return Upload(copied, None)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        return Upload(copied, done)

    def place_all(self, kv: ChunkKV) -> ResidentKV:
        """Copy a chunk's KV to its devices."""
        layers = [self.place(number, layer) for number, layer in enumerate(kv.layers)]
        return ResidentKV(kv.token_ids, kv.start, layers, kv.context)

    def tell_no_room(self, error: BaseException) -> None:
        """Say once that a device has less memory than this tier may use."""
        with self._lock:
            is_first, self._warned = not self._warned, True
        if is_first:
            _log.warning(
                "KV is not kept on its device: %s; give a smaller device_bytes than %d (this warning is not repeated)",
                str(error).partition("\n")[0] or type(error).__name__,
                self.limit_bytes,
            )


def spare_bytes(devices: Sequence[torch.device]) -> int:
    """Return an eighth of the memory that is free on the CUDA devices among these; 0 where there is none."""
    cuda = {device for device in devices if device.type == "cuda"}
    return sum(torch.cuda.mem_get_info(device)[0] for device in cuda) // _SPARE_SHARE


@contextmanager
def device_probe(tier: DeviceTier, chunks: Sequence[ChunkKV]) -> Iterator[OpenProbe]:
    """Read chunks as the device tier does; see `TierProbe`."""
    resident = [tier.place_all(kv) for kv in chunks]
    yield lambda: [DeviceReader(kv) for kv in resident]


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

    def add(self, index: int, layer: Layer) -> None:
        with self._lock:
            if self._layers is not None:
                self._layers[index] = layer

    def end(self) -> dict[int, Layer] | None:
        """Give the room back, if that is still to be done, and return what came of the chunk."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is not None:
            self._tier.give_back(self._nbytes)
        return layers

    def complete(self, read: Callable[[int], Layer]) -> Sequence[Layer] | None:
        """Return all layers, or None if most are wanting; the few that nobody asked for, their KV being computed, are read."""
        layers = self.end()
        missing = [number for number in range(self._num_layers) if number not in (layers or {})]
        if layers is None or len(missing) * 2 > self._num_layers:
            return None
        try:
            layers.update([(number, read(number)) for number in missing])
        except ChunkReadError as error:
            _log.warning("%s", error)
            return None
        return [layers[number] for number in range(self._num_layers)]


class PromotingReader(KVReader):
    """Reads a file or KV in RAM, and hands what it has read to RAM and to the device tier in `finish`.

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
        self._packed: _Promotion[PackedLayer] | None = None
        if ram is not None:
            # Packing never makes KV larger, unpacking may.
            nbytes = source.kv_bytes if ram.codec.name == "native" else source.packed_bytes
            self._packed = _Promotion(ram, nbytes, self.num_layers)
            self._packed.begin()
        self._uploads: _Promotion[Upload] | None = None
        if device is not None:
            self._uploads = _Promotion(device, source.kv_bytes, self.num_layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once where it goes to RAM; the caller must not write to it."""
        if self._packed is None or self._ram is None or not self._packed.begin():
            return self._source.layer(index)
        packed = self._packed.get(index)
        if packed is None:
            packed = repack_layer(self._source.packed_layer(index), self._ram.codec)
            self._packed.add(index, packed)
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
        if self._packed is not None and self._to_ram is not None:
            packed = self._packed.complete(self._source.packed_layer)
            if packed is not None:
                self._to_ram(PackedKV(self.token_ids, self.start, tuple(packed), self.context))
        device, uploads = self._device, self._uploads
        if device is None or uploads is None or self._to_device is None:
            return
        try:
            layers = uploads.complete(lambda number: device.place(number, self._source.layer(number)))
        except (torch.OutOfMemoryError, MemoryError) as error:
            device.tell_no_room(error)
            return
        if layers is not None:
            self._to_device(ResidentKV(self.token_ids, self.start, layers, self.context))
