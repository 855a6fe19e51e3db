"""Putting one layer of every chunk into one buffer, at its place in the prompt and rotated to its position."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader.device import Upload, Uploads
from cacheblend_rag.loader.pieces import Piece, cut_pieces, join
from cacheblend_rag.model import Decoder
from cacheblend_rag.rope import Rotation, RotationTable, shift_keys
from cacheblend_rag.store.base import KVReader

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
        self._reposition = reposition
        row_bytes = max(decoder.kv_bytes_per_token // decoder.num_layers, 1)
        self.pieces = cut_pieces(layout, max(_PIECE_BYTES // row_bytes, layout.context_tokens // shares, 1))
        self._lock = threading.Lock()
        self._buffers: dict[int, LayerKV] = {}
        self._tables: dict[tuple[int, Rotation, torch.device], RotationTable | None] = {}
        self._uploads = Uploads()

    @torch.no_grad()
    def fill(self, layer: int, piece: Piece) -> int:
        """Read one layer of the chunks of a piece and put it into the layer's buffer; return its bytes.

        Raises
        ------
        ChunkReadError
            If the stored KV of a chunk is gone or damaged.
        """
        parts = [reader.layer(layer) for reader in self._readers[piece.chunks]]
        device = self.device(layer)
        keys, values = self._buffer(layer, parts[0], device)
        join([part.keys for part in parts], piece.gaps, keys[0, :, piece.rows])
        join([part.values for part in parts], piece.gaps, values[0, :, piece.rows])
        if device.type == "cpu":
            self._shift(layer, piece, keys)
        return sum(part.nbytes for part in parts)

    @torch.no_grad()
    def finish(self, layer: int) -> LayerKV | Upload:
        """Take away a layer of which every piece was filled, on its way to its device if that is not the CPU."""
        with self._lock:
            buffer = self._buffers.pop(layer)
        device = self.device(layer)
        if device.type == "cpu":
            return buffer
        rows = slice(self.pieces[0].rows.start, self.pieces[-1].rows.stop)
        return self._uploads.begin(buffer, rows, device, lambda keys: self._shift_all(layer, keys))

    def device(self, layer: int) -> torch.device:
        """Return where a layer is computed."""
        return next(self._decoder.layers[layer].parameters()).device

    def _buffer(self, layer: int, sample: LayerKV, device: torch.device) -> LayerKV:
        with self._lock:
            buffer = self._buffers.get(layer)
            if buffer is None:
                # Pages are touched first by the threads that fill them, not here and not in the computation.
                buffer = self._buffers[layer] = LayerKV(
                    *(
                        torch.empty(
                            (1, part.shape[0], self._capacity, part.shape[2]),
                            dtype=part.dtype,
                            pin_memory=device.type == "cuda",
                        )
                        for part in sample
                    )
                )
            return buffer

    def _shift_all(self, layer: int, keys: torch.Tensor) -> None:
        for piece in self.pieces:
            self._shift(layer, piece, keys)

    def _shift(self, layer: int, piece: Piece, keys: torch.Tensor) -> None:
        rotation = self._decoder.rotations[layer] if self._reposition else None
        table = None if rotation is None else self._table(piece, rotation, keys.device)
        if table is not None:
            shift_keys(keys[0, :, piece.rows], table)

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
