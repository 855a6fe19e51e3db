"""Putting one layer of every chunk into one buffer, at its place in the prompt and rotated to its position."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader.device import Uploads
from cacheblend_rag.loader.pieces import Piece, cut_pieces, join
from cacheblend_rag.model import Decoder
from cacheblend_rag.rope import Rotation, RotationTable, shift_layer
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.device import Upload

__all__ = ["Assembly"]

# Less than this of a layer is not worth a task of its own.
_PIECE_BYTES = 256 * 1024


class Assembly:
    """The buffers of one prompt. A layer is filled piece by piece, by any threads, and then finished by one.

    Parameters
    ----------
    decoder : Decoder
        The model.
    layout : PromptLayout
        The prompt.
    readers : sequence of KVReader
        One for each chunk of the layout.
    capacity : int
        Rows of the buffers.
    shares : int
        In how many pieces of like size a layer is cut, where it is large enough.
    reposition : bool
        Whether keys are turned to their position in the prompt.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: PromptLayout,
        readers: Sequence[KVReader],
        capacity: int,
        shares: int,
        reposition: bool = True,
    ) -> None:
        self._decoder = decoder
        self._layout = layout
        self._readers = readers
        self._capacity = capacity
        self._devices = decoder.devices
        self._reposition = reposition
        row_bytes = max(decoder.kv_bytes_per_token // decoder.num_kv_layers, 1)
        self.pieces = cut_pieces(
            layout,
            max(_PIECE_BYTES // row_bytes, layout.context_tokens // shares, 1),
            [reader.devices == self._devices for reader in readers],
        )
        self._rising = [reader for reader in readers if reader.promotes_to_device]
        self._lock = threading.Lock()
        self._buffers: dict[int, LayerKV] = {}
        # What was read into page-locked memory, by layer and first row of its piece.
        self._direct: dict[tuple[int, int], list[LayerKV]] = {}
        self._tables: dict[tuple[int, Rotation, torch.device], RotationTable | None] = {}
        self._uploads = Uploads()

    @torch.no_grad()
    def fill(self, layer: int, piece: Piece) -> int:
        """Read one layer of the chunks of a piece and put it into the layer's buffer; return its bytes.

        What is resident on a device of its own is put into place by `finish`.

        Raises
        ------
        ChunkReadError
            If the stored KV of a chunk is gone or damaged.
        """
        is_staged = _is_staged(self.device(layer))
        if piece.is_resident:
            if not is_staged:
                parts = self._resident(layer, piece)
                keys, values = self._buffer(layer, parts[0])
                self._join(parts, piece, keys, values)
                self._shift(layer, piece, LayerKV(keys, values))
            return 0
        parts = [reader.layer(layer) for reader in self._readers[piece.chunks]]
        if is_staged and all(map(_is_page_locked, parts)):
            # The device copies from where they are.
            with self._lock:
                self._direct[layer, piece.rows.start] = parts
            return sum(part.nbytes for part in parts)
        keys, values = self._buffer(layer, parts[0])
        self._join(parts, piece, keys, values)
        if not is_staged:
            self._let_rise(layer, piece, keys, values)
            self._shift(layer, piece, LayerKV(keys, values))
        return sum(part.nbytes for part in parts)

    @torch.no_grad()
    def finish(self, layer: int) -> LayerKV | Upload:
        """Take away a layer of which every piece was filled, on its way to its device if that is not the CPU."""
        with self._lock:
            buffer = self._buffers.pop(layer, None)
            direct = [self._direct.pop((layer, piece.rows.start), None) for piece in self.pieces]
        device = self.device(layer)
        if _is_staged(device):
            return self._uploads.begin(device, lambda: self._on_device(layer, buffer, direct, device))
        assert buffer is not None
        return buffer

    @torch.no_grad()
    def end(self) -> None:
        """Say that no layer is read any more: what was put on its device for this prompt may stay there."""
        for reader in self._rising:
            reader.finish()

    def device(self, layer: int) -> torch.device:
        """Return where a layer is computed."""
        return self._devices[layer]

    def _on_device(
        self, layer: int, staged: LayerKV | None, direct: Sequence[list[LayerKV] | None], device: torch.device
    ) -> LayerKV:
        """Put a layer together on its device.

        Parameters
        ----------
        layer : int
            The layer.
        staged : LayerKV, optional
            The buffer that `fill` filled, ``(1, num_kv_heads, capacity, head_dim)``, if there was any need of it.
        direct : sequence of (list of LayerKV) or None
            For each piece the layer of its chunks, where `fill` did not put them into the buffer.
        device : torch.device
            The device.
        """
        made: LayerKV | None = None
        on_the_way = zip(self.pieces, direct, strict=True)
        for is_staged, group in groupby(on_the_way, key=lambda each: not each[0].is_resident and each[1] is None):
            pieces = list(group)
            if is_staged:
                assert staged is not None
                made = made or self._empty(LayerKV(*(each[0] for each in staged)), device)
                rows = slice(pieces[0][0].rows.start, pieces[-1][0].rows.stop)
                for into, tensor in zip(made, staged, strict=True):
                    # Head by head both sides are contiguous, which is one transfer; a cut of all heads would be copied twice.
                    for head in range(tensor.shape[1]):
                        into[0, head, rows].copy_(tensor[0, head, rows], non_blocking=True)
                continue
            for piece, parts in pieces:
                there = self._resident(layer, piece) if parts is None else [_moved(part, device) for part in parts]
                made = made or self._empty(there[0], device)
                self._join(there, piece, *made)
        assert made is not None
        for piece in self.pieces:
            self._let_rise(layer, piece, *made)
            self._shift(layer, piece, made)
        return made

    def _resident(self, layer: int, piece: Piece) -> list[LayerKV]:
        return [reader.resident(layer) for reader in self._readers[piece.chunks]]

    def _join(self, parts: Sequence[LayerKV], piece: Piece, keys: torch.Tensor, values: torch.Tensor) -> None:
        join([part.keys for part in parts], piece.gaps, keys[0, :, piece.rows])
        join([part.values for part in parts], piece.gaps, values[0, :, piece.rows])

    def _let_rise(self, layer: int, piece: Piece, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Offer the chunks of a piece to the device tier, while their keys are as they were stored."""
        if not self._rising:
            return
        for reader, span in zip(self._readers[piece.chunks], self._layout.chunks[piece.chunks], strict=True):
            if reader.promotes_to_device:
                reader.keep(layer, LayerKV(*(each[0, :, span.start : span.stop] for each in (keys, values))))

    def _buffer(self, layer: int, sample: LayerKV) -> LayerKV:
        with self._lock:
            buffer = self._buffers.get(layer)
            if buffer is None:
                # Pages are touched first by the threads that fill them, not here and not in the computation.
                is_pinned = self.device(layer).type == "cuda"
                buffer = self._buffers[layer] = self._empty(sample, torch.device("cpu"), is_pinned)
            return buffer

    def _empty(self, sample: LayerKV, device: torch.device, is_pinned: bool = False) -> LayerKV:
        shapes = ((1, part.shape[0], self._capacity, part.shape[2]) for part in sample)
        return LayerKV(
            *(
                torch.empty(shape, dtype=part.dtype, device=device, pin_memory=is_pinned)
                for shape, part in zip(shapes, sample, strict=True)
            )
        )

    def _shift(self, layer: int, piece: Piece, kv: LayerKV) -> None:
        rotation = self._decoder.rotations[layer] if self._reposition else None
        table = None if rotation is None else self._table(piece, rotation, kv.keys.device)
        if table is not None:
            shift_layer(LayerKV(*(part[0, :, piece.rows] for part in kv)), table)

    def _table(self, piece: Piece, rotation: Rotation, device: torch.device) -> RotationTable | None:
        """Return how far each row of a piece moves, or None if none does; made once for all layers that rotate alike."""
        with self._lock:
            known = (piece.rows.start, rotation, device)
            if known not in self._tables:
                spans, readers = self._layout.chunks[piece.chunks], self._readers[piece.chunks]
                distances: list[int] = []
                for span, reader, gap in zip(spans, readers, (*piece.gaps, 0), strict=True):
                    distances += [span.position - reader.start] * len(span) + [0] * gap
                self._tables[known] = rotation.table(torch.tensor(distances), device) if any(distances) else None
            return self._tables[known]


def _is_staged(device: torch.device) -> bool:
    """Return whether layers are put together on the CPU first, and then moved."""
    return device.type != "cpu"


def _is_page_locked(part: LayerKV) -> bool:
    return all(tensor.is_pinned() for tensor in part)


def _moved(part: LayerKV, device: torch.device) -> LayerKV:
    return LayerKV(*(tensor.to(device, non_blocking=True) for tensor in part))
