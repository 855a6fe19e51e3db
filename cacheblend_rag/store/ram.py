"""The RAM tier: whole chunks, least recently used dropped first."""

from __future__ import annotations

from dataclasses import replace
from logging import getLogger

from cacheblend_rag.codec import Codec, PackedKV, PackedLayer, make_codec, pack_kv, repack_layer, unpack_layer
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.reader import HoldingReader
from cacheblend_rag.store.shelf import Shelf

__all__ = ["RamReader", "RamTier"]

_log = getLogger(__name__)


class RamReader(HoldingReader[PackedKV]):
    """Reads KV that is held in RAM.

    Parameters
    ----------
    kv : PackedKV or ChunkKV
        The KV, packed or as it is.
    """

    tier = "ram"

    def __init__(self, kv: PackedKV | ChunkKV) -> None:
        super().__init__(kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native")))

    @property
    def codec(self) -> str:
        """How its layers are packed, most of them if not all alike."""
        return self._kv.codec

    @property
    def kv_bytes(self) -> int:
        """Size of all layers as they are unpacked."""
        return sum(layer.key_form.nbytes + layer.value_form.nbytes for layer in self._kv.layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, unpacked; the caller must not write to it."""
        return unpack_layer(self._kv.layers[index])


class RamTier(Shelf[PackedKV]):
    """Chunk KV in memory, at most so many bytes of it.

    Parameters
    ----------
    limit_bytes : int
        Most bytes of KV held, as it is packed, reservations included. An entry that is bigger than this is not kept.
    codec : Codec, optional
        How KV is kept; by default as it is.
    page_locked : bool
        Whether KV is kept in page-locked memory, from which a CUDA device copies without the processor. Where there is none to be
        had it is kept in ordinary memory, with one warning.
    """

    def __init__(self, limit_bytes: int, codec: Codec | None = None, page_locked: bool = False) -> None:
        super().__init__(limit_bytes)
        self.codec = make_codec("native") if codec is None else codec
        self._page_locked = page_locked

    def pack(self, kv: ChunkKV | PackedKV) -> PackedKV:
        """Return `kv` as this tier keeps it."""
        return pack_kv(kv, self.codec)

    def put(self, key: str, kv: ChunkKV | PackedKV, hidden: bool = False) -> bool:
        """Keep `kv`, packed; see `Shelf.keep`."""
        return self.keep(key, self._lock_pages(_owned(self.pack(kv))), hidden)

    def repack(self, layer: PackedLayer) -> PackedLayer:
        """Return one layer as this tier keeps it."""
        return repack_layer(layer, self.codec)

    def _lock_pages(self, kv: PackedKV) -> PackedKV:
        """Move KV that is not bigger than this tier to page-locked memory, if that is wanted and to be had."""
        if not self._page_locked or kv.nbytes > self.limit_bytes:
            return kv
        try:
            return replace(
                kv,
                layers=tuple(
                    replace(layer, parts={name: part.pin_memory() for name, part in layer.parts.items()})
                    for layer in kv.layers
                ),
            )
        except RuntimeError as error:
            self._page_locked = False
            _log.warning(
                "KV is kept in ordinary memory, page-locked memory is not to be had: %s (set page_locked=False, or a smaller "
                "ram_bytes; this is said once)",
                str(error).partition("\n")[0],
            )
            return kv


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

    return replace(kv, layers=tuple(map(compact, kv.layers)))
