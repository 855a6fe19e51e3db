"""Putting one layer of every chunk into one buffer, at its place in the prompt and rotated to its position."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from cacheblend_rag.kv import LayerKV, Rotation, RotationTable, shift_layer
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader.buffers import empty_buffer
from cacheblend_rag.store.base import KVReader

__all__ = ["Assembly", "KVForm", "Piece", "Upload"]

# Less than this of a layer is not worth a task of its own.
_PIECE_BYTES = 256 * 1024
_CLOSE_ROWS = 32


class KVForm(Protocol):
    """Form of a model's KV, by which it is loaded; a `Decoder` and a `ModelCard` have it."""

    @property
    def num_kv_layers(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def rotations(self) -> tuple[Rotation | None, ...]: ...
    @property
    def devices(self) -> tuple[torch.device, ...]: ...


@dataclass(frozen=True, eq=False)
class Upload:
    """A layer on its way to a CUDA device; `done` is recorded after what writes it."""

    layer: LayerKV
    done: torch.cuda.Event

    def receive(self) -> LayerKV:
        """Make the current stream wait for the layer, without waiting here, and hand it over."""
        stream = torch.cuda.current_stream(self.layer.keys.device)
        stream.wait_event(self.done)
        for tensor in self.layer:
            # The memory belongs to the stream that wrote it: without this it could be given out again too early.
            tensor.record_stream(stream)
        return self.layer


@dataclass(frozen=True)
class Piece:
    """Chunks that are loaded in one go, with the rows of text between them, which the computation overwrites."""

    # Their indices, and their rows with those between them.
    chunks: slice
    rows: slice
    # How many rows are between each chunk and the next.
    gaps: tuple[int, ...]
    # Whether their KV is on the devices of its layers, so that it is not loaded.
    is_resident: bool


class Assembly:
    """The buffers of one prompt, of `capacity` rows: a layer is filled piece by piece, by any threads, and finished by one."""

    def __init__(
        self, form: KVForm, layout: PromptLayout, readers: Sequence[KVReader], capacity: int, shares: int
    ) -> None:
        self._rotations = form.rotations
        self._layout = layout
        self._readers = readers
        self._capacity = capacity
        self._devices = form.devices
        row_bytes = max(form.kv_bytes_per_token // form.num_kv_layers, 1)
        self.pieces = self._cut(max(_PIECE_BYTES // row_bytes, layout.context_tokens // shares, 1))
        self._lock = threading.Lock()
        self._buffers: dict[int, LayerKV] = {}
        # What the device takes from where it is, by layer and first row of its piece.
        self._direct: dict[tuple[int, int], list[LayerKV]] = {}
        self._tables: dict[tuple[int, Rotation, torch.device], RotationTable | None] = {}
        # Layers are put together on each device in one stream beside that of the computation.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {device for device in form.devices if device.type == "cuda"}:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # What is resident may still be computed there.
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def _cut(self, least_rows: int) -> list[Piece]:
        """Group close chunks, up to `least_rows` rows, all resident or none: many small ones cost one copy and rotation."""
        pieces: list[Piece] = []
        for index, (span, reader) in enumerate(zip(self._layout.chunks, self._readers, strict=True)):
            is_resident = reader.tier == "device"
            last = pieces[-1] if pieces and pieces[-1].is_resident == is_resident else None
            gap = span.start - last.rows.stop if last else 0
            if last is not None and gap <= _CLOSE_ROWS and last.rows.stop - last.rows.start < least_rows:
                pieces[-1] = Piece(
                    slice(last.chunks.start, index + 1),
                    slice(last.rows.start, span.stop),
                    (*last.gaps, gap),
                    is_resident,
                )
            else:
                pieces.append(Piece(slice(index, index + 1), slice(span.start, span.stop), (), is_resident))
        return pieces

    @torch.no_grad()
    def fill(self, layer: int, piece: Piece) -> int:
        """Read one layer of a piece into the layer's buffer and return its bytes; what a device can take itself `finish` does."""
        is_staged = _is_staged(self._devices[layer])
        parts = [reader.layer(layer) for reader in self._readers[piece.chunks]]
        if is_staged and (piece.is_resident or all(map(_is_page_locked, parts))):
            # The device copies from where they are.
            with self._lock:
                self._direct[layer, piece.rows.start] = parts
        else:
            with self._lock:
                buffer = self._buffers.get(layer)
                if buffer is None:
                    # Pages are touched first by the threads that fill them, not here and not in the computation.
                    is_pinned = self._devices[layer].type == "cuda"
                    buffer = self._buffers[layer] = self._empty(parts[0], torch.device("cpu"), is_pinned)
            self._join(parts, piece, buffer)
            if not is_staged:
                self._settle(layer, piece, buffer)
        return 0 if piece.is_resident else sum(part.nbytes for part in parts)

    @torch.no_grad()
    def finish(self, layer: int) -> LayerKV | Upload:
        """Take away a filled layer, on its way to its device; pinned memory may be let go, its allocator waits for copies."""
        device = self._devices[layer]
        with self._lock:
            buffer = self._buffers.pop(layer, None)
            direct = [self._direct.pop((layer, piece.rows.start), None) for piece in self.pieces]
        if device.type == "cuda":
            with torch.cuda.stream(self._streams[device]):
                return Upload(self._on_device(layer, buffer, direct), self._streams[device].record_event())
        if _is_staged(device):
            return self._on_device(layer, buffer, direct)
        assert buffer is not None
        return buffer

    @torch.no_grad()
    def end(self) -> None:
        """End reading: what was read for this prompt may stay in RAM."""
        for reader in self._readers:
            reader.finish()

    def _on_device(self, layer: int, staged: LayerKV | None, direct: Sequence[list[LayerKV] | None]) -> LayerKV:
        """Put a layer together on its device, by copies that do not wait, from the `staged` buffer or the `direct` pieces."""
        device = self._devices[layer]
        made: LayerKV | None = None
        on_the_way = zip(self.pieces, direct, strict=True)
        for is_staged, group in groupby(on_the_way, key=lambda each: each[1] is None):
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
                there = [LayerKV(*(tensor.to(device, non_blocking=True) for tensor in part)) for part in parts or ()]
                if piece.is_resident and device in self._streams:
                    for tensor in (tensor for part in there for tensor in part):
                        tensor.record_stream(self._streams[device])
                made = made or self._empty(there[0], device)
                self._join(there, piece, made)
        assert made is not None
        for piece in self.pieces:
            self._settle(layer, piece, made)
        return made

    def _join(self, parts: Sequence[LayerKV], piece: Piece, whole: LayerKV) -> None:
        """Write the layers of a piece's chunks into the rows of the piece, and zeros into the gaps between."""
        for tensors, into in zip(zip(*parts, strict=True), whole, strict=True):
            heads, _, width = tensors[0].shape
            joined = [tensors[0]]
            for tensor, gap in zip(tensors[1:], piece.gaps, strict=True):
                if gap:
                    joined.append(tensor.new_zeros(1, 1, 1).expand(heads, gap, width))
                joined.append(tensor)
            torch.cat(joined, dim=1, out=into[0, :, piece.rows])

    def _empty(self, sample: LayerKV, device: torch.device, is_pinned: bool = False) -> LayerKV:
        shapes = [(1, part.shape[0], self._capacity, part.shape[2]) for part in sample]
        if device.type == "cpu" and not is_pinned:
            if sample.keys.shape == sample.values.shape and sample.keys.dtype == sample.values.dtype:
                return LayerKV(*empty_buffer((2, *shapes[0]), sample.keys.dtype))
            return LayerKV(*(empty_buffer(shape, part.dtype) for shape, part in zip(shapes, sample, strict=True)))
        return LayerKV(
            *(
                torch.empty(shape, dtype=part.dtype, device=device, pin_memory=is_pinned)
                for shape, part in zip(shapes, sample, strict=True)
            )
        )

    def _settle(self, layer: int, piece: Piece, whole: LayerKV) -> None:
        """Turn the keys of a piece's chunks to their positions."""
        spans, readers = self._layout.chunks[piece.chunks], self._readers[piece.chunks]
        rotation = self._rotations[layer]
        if rotation is None:
            return
        with self._lock:
            # How far each row moves, None if none does: made once for all layers that rotate alike.
            known = (piece.rows.start, rotation, whole.keys.device)
            if known not in self._tables:
                distances: list[int] = []
                for span, reader, gap in zip(spans, readers, (*piece.gaps, 0), strict=True):
                    distances += [span.position - reader.start] * len(span) + [0] * gap
                moves = any(distances)
                self._tables[known] = rotation.table(torch.tensor(distances), whole.keys.device) if moves else None
            table = self._tables[known]
        if table is not None:
            shift_layer(LayerKV(*(part[0, :, piece.rows] for part in whole)), table)


def _is_staged(device: torch.device) -> bool:
    """Return whether layers are put together on the CPU first, and then moved."""
    return device.type != "cpu"


def _is_page_locked(part: LayerKV) -> bool:
    return all(tensor.is_pinned() for tensor in part)
