"""From disk to RAM: a reader that keeps what it has read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from logging import getLogger

from cacheblend_rag.codec import PackedKV, PackedLayer, unpack_layer
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.ram import RamTier
from cacheblend_rag.store.reader import PassingReader

__all__ = ["PromotingReader"]

_log = getLogger(__name__)


class PromotingReader(PassingReader[ChunkFile]):
    """Reads a file layer by layer, and hands its KV to RAM when the last one was read."""

    def __init__(
        self, file: ChunkFile, ram: RamTier, reserved_bytes: int, keep: Callable[[str, PackedKV], None]
    ) -> None:
        super().__init__(file)
        self._ram = ram
        self._keep = keep
        self._lock = threading.Lock()
        self._layers: dict[int, PackedLayer] = {}
        self._reading = 0
        self._ends = False
        self._reserved_bytes = reserved_bytes

    def __del__(self) -> None:
        self._ram.give_back(self._reserved_bytes)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once; the caller must not write to it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        with self._lock:
            held = self._layers.get(index)
            if held is None:
                self._reading += 1
        if held is not None:
            return unpack_layer(held)
        try:
            packed = self._reader.packed_layer(index)
            layer = self._ram.repack(packed) if self._reserved_bytes else packed
        finally:
            with self._lock:
                self._reading -= 1
        self._hold(index, layer)
        return unpack_layer(layer)

    def _hold(self, index: int, layer: PackedLayer) -> None:
        with self._lock:
            if not self._reserved_bytes:
                return
            self._layers[index] = layer
            # The last layer may be read before others are that another thread has begun.
            self._ends = self._ends or index == self.num_layers - 1 or len(self._layers) == self.num_layers
            if not self._ends or self._reading:
                return
            layers, self._layers = self._layers, {}
            reserved, self._reserved_bytes = self._reserved_bytes, 0
        self._ram.give_back(reserved)
        self._complete(layers)

    def _complete(self, layers: dict[int, PackedLayer]) -> None:
        """Give the layers to RAM, with the few that nobody asked for because their KV is computed in full."""
        missing = [number for number in range(self.num_layers) if number not in layers]
        if len(missing) * 2 > self.num_layers:
            return
        try:
            layers.update((number, self._reader.packed_layer(number)) for number in missing)
        except ChunkReadError as error:
            _log.warning("%s", error)
            return
        whole = tuple(layers[number] for number in range(self.num_layers))
        self._keep(self._reader.key, PackedKV(self.token_ids, self.start, whole, self.context))
