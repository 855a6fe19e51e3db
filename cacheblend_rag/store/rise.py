"""From RAM or a file to the device: a reader that keeps what was put on the device for a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger

import torch

from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.device import DeviceTier, ResidentKV, Upload
from cacheblend_rag.store.reader import PassingReader

__all__ = ["RisingReader"]

_log = getLogger(__name__)


class RisingReader(PassingReader[KVReader]):
    """Reads KV from a slower tier, and is told what its layers are on their devices, which it keeps there.

    Who reads calls `keep` with each layer once it is on its device, and `finish` at the end. Whoever does not leaves the device
    tier as it is. Room is made when the first layer is kept: by then all chunks of a prompt are opened, and none that it needs
    has to be read because it had to go.

    Parameters
    ----------
    reader : KVReader
        Reads the slower tier.
    tier : DeviceTier
        Where it goes.
    kv_bytes : int
        Size of all layers there.
    keep : callable
        Takes the KV when it is complete.
    """

    def __init__(self, reader: KVReader, tier: DeviceTier, kv_bytes: int, keep: Callable[[ResidentKV], None]) -> None:
        super().__init__(reader)
        self._tier = tier
        self._kv_bytes = kv_bytes
        self._reserved_bytes = 0
        self._keep = keep
        self._lock = threading.Lock()
        self._layers: dict[int, Upload] | None = None
        self._began = False

    def __del__(self) -> None:
        self._tier.give_back(self._reserved_bytes)

    def layer(self, index: int) -> LayerKV:
        """Return one layer on the CPU; the caller must not write to it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        return self._reader.layer(index)

    def keep(self, index: int, layer: LayerKV) -> None:
        """Copy a layer that was read, ``(num_kv_heads, seq_len, head_dim)``, its keys as they were stored.

        Parameters
        ----------
        index : int
            The layer's number.
        layer : LayerKV
            The layer, best on its device already. It is copied in the current stream, and may be written to afterwards.
        """
        if not self._begin():
            return
        with self._within_memory():
            upload = self._tier.place(index, layer)
            with self._lock:
                if self._layers is not None:
                    self._layers[index] = upload

    def finish(self) -> None:
        """Hand the KV over, with the few layers that nobody asked for because their KV is computed in full."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is not None:
            missing = [number for number in range(self.num_layers) if number not in layers]
            if len(missing) * 2 <= self.num_layers:
                with self._within_memory():
                    layers.update((number, self._tier.place(number, self._reader.layer(number))) for number in missing)
                    self._give_back()
                    uploads = [layers[number] for number in range(self.num_layers)]
                    self._keep(ResidentKV(self.token_ids, self.start, uploads, self.context))
        self._give_back()

    def _begin(self) -> bool:
        """Reserve room, the first time; return whether there was any and the KV still rises."""
        with self._lock:
            if not self._began:
                self._began = True
                if self._tier.reserve(self._kv_bytes):
                    self._reserved_bytes = self._kv_bytes
                    self._layers = {}
            return self._layers is not None

    @contextmanager
    def _within_memory(self) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._layers = None
            self._give_back()
            self._tier.tell_no_room(error)
        except ChunkReadError as error:
            _log.warning("%s", error)

    def _give_back(self) -> None:
        with self._lock:
            reserved, self._reserved_bytes = self._reserved_bytes, 0
        self._tier.give_back(reserved)
