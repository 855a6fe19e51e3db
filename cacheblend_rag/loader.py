"""Fetching stored KV layer by layer, ahead of the computation.

While layer i is computed, a thread reads layer i + 1 of every chunk, moves its keys to their position in the prompt and
puts the whole into one buffer (CacheBlend, section 5).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder
from cacheblend_rag.rope import Rotation, RotationTable, shift_keys
from cacheblend_rag.store.base import KVReader

__all__ = ["LayerLoader", "loads_ahead"]

_CLOSE_ROWS = 32
# Below this, handing a layer from thread to thread costs more than assembling it.
_THREAD_PAYS_BYTES = 1 << 20


def loads_ahead(layer_bytes: int) -> bool:
    """Return whether layers of so many bytes are loaded while others are computed, and not when they are asked for."""
    return layer_bytes >= _THREAD_PAYS_BYTES


class LayerLoader:
    """Assembles the chunks of one prompt, layer by layer, ahead of the computation; a context manager.

    Layers of some size are assembled in a thread of its own, small ones when they are asked for.

    Parameters
    ----------
    decoder : Decoder
        The model.
    layout : PromptLayout
        The prompt.
    readers : sequence of KVReader
        One for each chunk of the layout.
    first_layer : int
        The first layer that will be asked for; the ones before are computed in full and need no stored KV.
    capacity : int
        Rows of the buffers, at least the length of the prompt; what is more is room for generated tokens.
    ahead : int
        How many layers the loader may be ahead of the computation.

    Attributes
    ----------
    wait_s : float
        Seconds that the computation has waited for layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: PromptLayout,
        readers: Sequence[KVReader],
        first_layer: int,
        capacity: int,
        ahead: int,
    ) -> None:
        assert len(readers) == len(layout.chunks) and capacity >= len(layout)
        self._decoder = decoder
        self._layout = layout
        self._readers = readers
        self._capacity = capacity
        self._regions = _regions(layout)
        self._tables: dict[tuple[int, Rotation, torch.device], RotationTable | None] = {}
        self._layers = range(first_layer, decoder.num_layers)
        self._ready: dict[int, LayerKV | BaseException] = {}
        self._changed = threading.Condition()
        self._room = threading.Semaphore(ahead + 1)
        self._closed = False
        self.wait_s = 0.0
        layer_bytes = layout.context_tokens * decoder.kv_bytes_per_token // decoder.num_layers
        self._thread = (
            threading.Thread(target=self._work, name="cacheblend-loader", daemon=True)
            if loads_ahead(layer_bytes)
            else None
        )

    def __enter__(self) -> LayerLoader:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._closed = True
            self._room.release()
            self._thread.join()

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until a layer is loaded and hand it over; each layer once, in ascending order.

        Parameters
        ----------
        layer : int
            The layer, from `first_layer` on.

        Returns
        -------
        LayerKV
            ``(1, num_kv_heads, capacity, head_dim)``; rows of chunk tokens are filled, all others are undefined.

        Raises
        ------
        ChunkReadError
            If the stored KV of a chunk is gone or damaged.
        """
        started = time.perf_counter()
        loaded = self.fetch_kv(layer) if self._thread is None else self._take(layer)
        self.wait_s += time.perf_counter() - started
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def _take(self, layer: int) -> LayerKV | BaseException:
        with self._changed:
            self._changed.wait_for(lambda: layer in self._ready)
            loaded = self._ready.pop(layer)
        self._room.release()
        return loaded

    def _work(self) -> None:
        for layer in self._layers:
            self._room.acquire()
            if self._closed:
                return
            try:
                loaded: LayerKV | BaseException = self.fetch_kv(layer)
            except BaseException as error:  # raised again where the layer is waited for
                loaded = error
            with self._changed:
                self._ready[layer] = loaded
                self._changed.notify_all()
            if isinstance(loaded, BaseException):
                return

    @torch.no_grad()
    def fetch_kv(self, layer: int) -> LayerKV:
        """Read one layer of every chunk and assemble it (CacheBlend, section 6)."""
        parts = [reader.layer(layer) for reader in self._readers]
        device = next(self._decoder.layers[layer].parameters()).device
        keys, values = (
            torch.empty((1, sample.shape[0], self._capacity, sample.shape[2]), dtype=sample.dtype, device=device)
            for sample in parts[0]
        )
        rotation = self._decoder.rotations[layer]
        for number, region in enumerate(self._regions):
            _join([part.keys for part in parts[region.chunks]], region.gaps, keys[0, :, region.rows])
            _join([part.values for part in parts[region.chunks]], region.gaps, values[0, :, region.rows])
            table = None if rotation is None else self._table(number, rotation, device)
            if table is not None:
                shift_keys(keys[0, :, region.rows], table)
        return LayerKV(keys, values)

    def _table(self, number: int, rotation: Rotation, device: torch.device) -> RotationTable | None:
        """Return how far each row of a region moves, or None if none does; made once for all layers that rotate alike."""
        known = (number, rotation, device)
        if known not in self._tables:
            region = self._regions[number]
            spans, readers = self._layout.chunks[region.chunks], self._readers[region.chunks]
            distances: list[int] = []
            for span, reader, gap in zip(spans, readers, (*region.gaps, 0), strict=True):
                distances += [span.position - reader.start] * len(span) + [0] * gap
            self._tables[known] = rotation.table(torch.tensor(distances), device) if any(distances) else None
        return self._tables[known]


@dataclass(frozen=True)
class _Region:
    """Chunks that are assembled in one go, with the rows of text between them, which the computation overwrites.

    Attributes
    ----------
    chunks : slice
        Their indices.
    rows : slice
        Their rows, and those between them.
    gaps : tuple of int
        How many rows are between each chunk and the next.
    """

    chunks: slice
    rows: slice
    gaps: tuple[int, ...]


def _regions(layout: PromptLayout) -> list[_Region]:
    """Group chunks that follow each other closely: one copy and one rotation for each group and layer."""
    regions: list[_Region] = []
    for index, span in enumerate(layout.chunks):
        last = regions[-1] if regions else None
        gap = span.start - last.rows.stop if last else 0
        if last is not None and gap <= _CLOSE_ROWS:
            regions[-1] = _Region(
                slice(last.chunks.start, index + 1), slice(last.rows.start, span.stop), (*last.gaps, gap)
            )
        else:
            regions.append(_Region(slice(index, index + 1), slice(span.start, span.stop), ()))
    return regions


def _join(parts: Sequence[torch.Tensor], gaps: Sequence[int], into: torch.Tensor) -> None:
    """Write `parts` into consecutive rows of `into`, zeros into the gaps between them."""
    heads, _, width = parts[0].shape
    pieces = [parts[0]]
    for part, gap in zip(parts[1:], gaps, strict=True):
        if gap:
            pieces.append(part.new_zeros(1, 1, 1).expand(heads, gap, width))
        pieces.append(part)
    if into.device.type == "cpu":
        torch.cat(pieces, dim=1, out=into)
    else:
        into.copy_(torch.cat(pieces, dim=1), non_blocking=True)
