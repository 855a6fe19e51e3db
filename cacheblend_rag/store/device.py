"""The device tier: whole chunks in the memory of the devices that compute, least recently used dropped first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger

import torch

from cacheblend_rag.kv import KV, ChunkKV, LayerKV
from cacheblend_rag.store.base import KVReader, OpenProbe
from cacheblend_rag.store.ram import LRUCache

__all__ = ["DeviceReader", "DeviceTier", "ResidentKV", "Upload", "device_probe", "spare_bytes"]

_log = getLogger(__name__)

_SPARE_SHARE = 8


@dataclass(frozen=True, eq=False)
class Upload:
    """A layer on its way to a device, or there; `done` is recorded behind what writes it, None if that was over already."""

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

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each layer is."""
        return tuple(upload.layer.keys.device for upload in self._layers)

    def resident(self, index: int) -> LayerKV:
        return self._layers[index].receive()

    def layer(self, index: int) -> LayerKV:
        return LayerKV(*(tensor.cpu() for tensor in self.resident(index)))


class DeviceTier(LRUCache[ResidentKV]):
    """Chunk KV unpacked, each layer on the device that computes it, at most so many bytes of it on all devices together.

    It holds copies only, of what slower tiers hold too. Pins do not reach it: what is pinned is never lost, but no device need
    keep it.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of KV held, reservations included; with 0 nothing is.
    devices : sequence of torch.device
        The device of each layer; the last one stands for all layers behind it.
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
        if not self._warned:
            self._warned = True
            _log.warning(
                "KV is not kept on its device: %s; give a smaller device_bytes than %d (this is said once)",
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
