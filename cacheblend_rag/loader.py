"""Handing stored KV to the computation layer by layer, loaded by threads that stay a few layers ahead.

While layer i is computed, threads read layer i + 1 of every chunk, check and decode it, move its keys to their position in
the prompt and put the whole into one buffer (CacheBlend, section 5).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import torch

from cacheblend_rag.kv import LayerKV, Rotation, RotationTable, shift_layer
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.report import LayerTimes
from cacheblend_rag.store import KVReader

__all__ = ["LayerLoader", "compute_alone"]

# Below this, handing a layer from thread to thread costs more than assembling it.
_THREAD_PAYS_BYTES = 1 << 20
_CPU_TIERS = frozenset({"ram", "device"})
# Less than this of a layer is not worth a task of its own.
_PIECE_BYTES = 256 * 1024
_CLOSE_ROWS = 32
# Buffers of the process that are kept for the next prompts, in few sizes, so that prompts of other lengths can have the same
# memory; smaller ones than the least are not worth it.
_KEPT_BYTES = 256 << 20
_LEAST_BYTES = 1 << 18
_HUGE_PAGE = 1 << 21


@dataclass(frozen=True, eq=False)
class _Upload:
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
class _Piece:
    """Chunks that are loaded in one go, with the rows of text between them, which the computation overwrites."""

    # Their indices, and their rows with those between them.
    chunks: slice
    rows: slice
    # How many rows are between each chunk and the next.
    gaps: tuple[int, ...]
    # Whether their KV is on the devices of its layers, so that it is not loaded.
    is_resident: bool


class LayerLoader:
    """Assembles the chunks of one prompt, layer by layer, ahead of the computation; a context manager.

    The work is cut into pieces, some chunks of one layer each. Threads load those of the layers up to `ahead` of the one that was
    asked for last; who waits for a layer loads what no thread has begun of it, which is all where there are no threads or layers
    are small. Layers before `first_layer` are computed in full and need no stored KV; rows of `capacity` beyond the prompt are
    room for generated tokens.
    """

    def __init__(
        self,
        form: Decoder | ModelCard,
        layout: PromptLayout,
        readers: Sequence[KVReader],
        first_layer: int,
        capacity: int,
        ahead: int,
        threads: int,
        times: LayerTimes | None = None,
    ) -> None:
        assert len(readers) == len(layout.chunks) and capacity >= len(layout)
        self._devices, self._rotations = form.devices, form.rotations
        self._layout, self._readers, self._capacity = layout, readers, capacity
        row_bytes = max(form.kv_bytes_per_token // form.num_kv_layers, 1)
        # What only moves within the CPU's memory is moved fastest by the threads of the computation.
        is_moved = all(device.type == "cpu" for device in form.devices) and _CPU_TIERS.issuperset(
            reader.tier for reader in readers
        )
        if is_moved or layout.context_tokens * form.kv_bytes_per_token < _THREAD_PAYS_BYTES * form.num_kv_layers:
            threads = 0
        self._pool = ThreadPoolExecutor(threads, "cacheblend-loader", compute_alone) if threads else None
        self._ahead = ahead if threads else 0
        shares = max(2 * threads, 1)
        self._pieces = self._cut(max(_PIECE_BYTES // row_bytes, layout.context_tokens // shares, 1))
        self._times = times or LayerTimes()
        self._next, self._end = first_layer, form.num_kv_layers
        self._lock = threading.Lock()
        # Of each layer that was begun what loads each piece; how many are not loaded, and what is made of all.
        self._tasks: dict[int, list[Future[None] | None]] = {}
        self._unfinished: dict[int, int] = {}
        self._ready: dict[int, LayerKV | _Upload] = {}
        self._buffers: dict[int, LayerKV] = {}
        # What the device takes from where it is, by layer and first row of its piece.
        self._direct: dict[tuple[int, int], list[LayerKV]] = {}
        self._tables: dict[tuple[int, Rotation, torch.device], RotationTable | None] = {}
        # What is begun by one thread is finished by another, and what is made in inference mode may be written to in no other.
        self._infers = torch.is_inference_mode_enabled()
        # Of KV as the model takes it; what is resident on its device is not loaded.
        self.load_bytes = 0
        self._host_wait_s = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # Layers are put together on each device in one stream beside that of the computation.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {device for device in form.devices if device.type == "cuda"}:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # What is resident may still be computed there.
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def __enter__(self) -> LayerLoader:
        self._begin(self._next + self._ahead)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ready.clear()
        if kind is None and self._next >= self._end and not self._tasks:
            with torch.no_grad():
                for reader in self._readers:
                    # What was read for this prompt may stay in RAM.
                    reader.finish()

    @property
    def wait_s(self) -> float:
        """Seconds in which nothing was computed because a layer was not there yet, on the device that computes it."""
        for _, received in self._stalls:
            received.synchronize()
        # The thread that gives a CUDA device its work runs ahead of it, so how long that thread waits says little.
        stalled_ms = sum(float(began.elapsed_time(received)) for began, received in self._stalls)
        return self._host_wait_s + stalled_ms / 1000

    def synchronize(self, layer: int) -> LayerKV:
        """Wait for a layer, ``(1, num_kv_heads, capacity, head_dim)`` with the chunks' rows filled; each once, in order."""
        device = self._devices[layer]
        started = self._times.asked[layer] = time.perf_counter()
        waited_from = _mark(device) if device.type == "cuda" else None
        self._begin(layer + 1 + self._ahead)
        others = []
        for piece, task in enumerate(self._tasks[layer]):
            if task is None or task.cancel():
                self.fetch_kv(layer, piece)
            else:
                others.append(task)
        for task in others:
            task.result()
        del self._tasks[layer]
        loaded = self._ready.pop(layer)
        result = loaded.receive() if isinstance(loaded, _Upload) else loaded
        ended = self._times.handed[layer] = time.perf_counter()
        if waited_from is None:
            self._host_wait_s += ended - started
        else:
            self._stalls.append((waited_from, _mark(device)))
        return result

    def _begin(self, stop: int) -> None:
        """Have threads load the layers before one, in ascending order; without threads who waits for them does."""
        count = len(self._pieces)
        while self._next < min(stop, self._end):
            layer, self._next = self._next, self._next + 1
            self._unfinished[layer] = count
            self._tasks[layer] = [
                None if self._pool is None else self._pool.submit(self._work, layer, piece) for piece in range(count)
            ]

    def _work(self, layer: int, piece: int) -> None:
        with torch.inference_mode(self._infers):
            self.fetch_kv(layer, piece)

    @torch.no_grad()
    def fetch_kv(self, layer: int, number: int) -> None:
        """Load one layer of one piece (CacheBlend, section 6) into its buffer; what a device can take itself `_finish` does."""
        self._times.load_began.setdefault(layer, time.perf_counter())
        piece, is_staged = self._pieces[number], _is_staged(self._devices[layer])
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
        with self._lock:
            self.load_bytes += 0 if piece.is_resident else sum(part.nbytes for part in parts)
            self._unfinished[layer] -= 1
            if self._unfinished[layer]:
                return
        self._ready[layer] = self._finish(layer)
        self._times.load_ended[layer] = time.perf_counter()

    def _cut(self, least_rows: int) -> list[_Piece]:
        """Group close chunks, up to `least_rows` rows, all resident or none: many small ones cost one copy and rotation."""
        pieces: list[_Piece] = []
        for index, (span, reader) in enumerate(zip(self._layout.chunks, self._readers, strict=True)):
            is_resident = reader.tier == "device"
            last = pieces[-1] if pieces and pieces[-1].is_resident == is_resident else None
            gap = span.start - last.rows.stop if last else 0
            if last is not None and gap <= _CLOSE_ROWS and last.rows.stop - last.rows.start < least_rows:
                pieces[-1] = _Piece(
                    slice(last.chunks.start, index + 1),
                    slice(last.rows.start, span.stop),
                    (*last.gaps, gap),
                    is_resident,
                )
            else:
                pieces.append(_Piece(slice(index, index + 1), slice(span.start, span.stop), (), is_resident))
        return pieces

    @torch.no_grad()
    def _finish(self, layer: int) -> LayerKV | _Upload:
        """Take away a filled layer, on its way to its device; pinned memory may be let go, its allocator waits for copies."""
        device = self._devices[layer]
        with self._lock:
            buffer = self._buffers.pop(layer, None)
            direct = [self._direct.pop((layer, piece.rows.start), None) for piece in self._pieces]
        if device.type == "cuda":
            with torch.cuda.stream(self._streams[device]):
                return _Upload(self._on_device(layer, buffer, direct), self._streams[device].record_event())
        if _is_staged(device):
            return self._on_device(layer, buffer, direct)
        assert buffer is not None
        return buffer

    def _on_device(self, layer: int, staged: LayerKV | None, direct: Sequence[list[LayerKV] | None]) -> LayerKV:
        """Put a layer together on its device, by copies that do not wait, from the `staged` buffer or the `direct` pieces."""
        device = self._devices[layer]
        made: LayerKV | None = None
        on_the_way = zip(self._pieces, direct, strict=True)
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
        for piece in self._pieces:
            self._settle(layer, piece, made)
        return made

    def _join(self, parts: Sequence[LayerKV], piece: _Piece, whole: LayerKV) -> None:
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
                return LayerKV(*_memory.empty((2, *shapes[0]), sample.keys.dtype))
            return LayerKV(*(_memory.empty(shape, part.dtype) for shape, part in zip(shapes, sample, strict=True)))
        return LayerKV(
            *(
                torch.empty(shape, dtype=part.dtype, device=device, pin_memory=is_pinned)
                for shape, part in zip(shapes, sample, strict=True)
            )
        )

    def _settle(self, layer: int, piece: _Piece, whole: LayerKV) -> None:
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


def _mark(device: torch.device) -> torch.cuda.Event:
    """Return an event after what a CUDA device's current stream has been given."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def compute_alone() -> None:
    """Keep this thread's tensor operations in it: OpenMP would give it helpers, on the cores that the computation runs on."""
    # A thread's number is settled at its first use; what was set before would be overwritten.
    torch.get_num_threads()
    try:
        ctypes.CDLL(None).omp_set_num_threads(1)
    except (AttributeError, OSError):
        # Another threading library: the loader works, with more threads than it needs.
        return


class _BufferPool:
    """Lends memory to any thread until no tensor is in it any more, and keeps some of what is not lent.

    The system gives memory page by page, as each is first touched. For a prompt of a few thousand tokens on a small model that
    takes longer than moving the KV.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the CPU with undefined contents."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return torch.empty(*shape, dtype=dtype)
        step = min(1 << (nbytes - 1).bit_length(), _HUGE_PAGE)
        memory = self._take(-(-nbytes // step) * step)
        # The tensor holds the view, and nothing else does.
        view = memoryview(memory)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(*shape)

    def _take(self, size: int) -> mmap.mmap:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if len(memory) == size:
                return memory
            self._free.append(memory)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        self._free.append(memory)
        # The oldest go: their size is asked for no longer.
        while sum(map(len, list(self._free))) > _KEPT_BYTES:
            try:
                self._free.popleft()
            except IndexError:
                break


_memory = _BufferPool()
