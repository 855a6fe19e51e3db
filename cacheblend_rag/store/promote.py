"""From disk to RAM: a reader that keeps what it has read."""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger

from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.ram import RamTier

__all__ = ["PromotingReader"]

_log = getLogger(__name__)


class PromotingReader:
    """Reads a file layer by layer, and hands its KV to RAM when the last one was read."""

    def __init__(self, file: ChunkFile, ram: RamTier, keep: Callable[[str, ChunkKV], None]) -> None:
        self._file = file
        self._ram = ram
        self._keep = keep
        self._layers: dict[int, LayerKV] = {}
        self._reserved_bytes = file.kv_bytes

    def __del__(self) -> None:
        self._ram.give_back(self._reserved_bytes)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._file.token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._file.start

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self._file.num_layers

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once; the caller must not write to it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        layer = self._layers.get(index)
        if layer is None:
            layer = self._file.layer(index)
            if self._reserved_bytes:
                self._layers[index] = layer
                if index == self.num_layers - 1 or len(self._layers) == self.num_layers:
                    self._complete()
        return layer

    def _complete(self) -> None:
        """Give the layers to RAM, with the few that nobody asked for because their KV is computed in full."""
        reserved, self._reserved_bytes = self._reserved_bytes, 0
        self._ram.give_back(reserved)
        layers, self._layers = self._layers, {}
        missing = [number for number in range(self.num_layers) if number not in layers]
        if len(missing) * 2 > self.num_layers:
            return
        try:
            layers.update((number, self._file.layer(number)) for number in missing)
        except ChunkReadError as error:
            _log.warning("%s", error)
            return
        self._keep(
            self._file.key, ChunkKV(self.token_ids, self.start, tuple(layers[n] for n in range(self.num_layers)))
        )
