"""Handing stored KV to the computation layer by layer, loaded by threads that stay a few layers ahead.

While layer i is computed, threads read layer i + 1 of every chunk, check and decode it, move its keys to their position in
the prompt and put the whole into one buffer (CacheBlend, section 5).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader.assembly import Assembly, KVForm, Upload
from cacheblend_rag.report import LayerTimes
from cacheblend_rag.store.base import KVReader

__all__ = ["LayerLoader", "compute_alone"]

# Below this, handing a layer from thread to thread costs more than assembling it.
_THREAD_PAYS_BYTES = 1 << 20
_CPU_TIERS = frozenset({"ram", "device"})


def _loads_ahead(form: KVForm, layout: PromptLayout, tiers: Collection[str]) -> bool:
    """Return whether the layers of a prompt's chunks, whose KV is in these tiers, are loaded by threads."""
    # What only moves within the CPU's memory is moved fastest by the threads of the computation.
    if all(device.type == "cpu" for device in form.devices) and _CPU_TIERS.issuperset(tiers):
        return False
    return layout.context_tokens * form.kv_bytes_per_token >= _THREAD_PAYS_BYTES * form.num_kv_layers


class LayerLoader:
    """Assembles the chunks of one prompt, layer by layer, ahead of the computation; a context manager.

    The work is cut into pieces, some chunks of one layer each. Threads load those of the layers up to `ahead` of the one that was
    asked for last; who waits for a layer loads what no thread has begun of it, which is all where there are no threads or layers
    are small. Layers before `first_layer` are computed in full and need no stored KV; rows of `capacity` beyond the prompt are
    room for generated tokens.
    """

    def __init__(
        self,
        form: KVForm,
        layout: PromptLayout,
        readers: Sequence[KVReader],
        first_layer: int,
        capacity: int,
        ahead: int,
        threads: int,
        times: LayerTimes | None = None,
    ) -> None:
        assert len(readers) == len(layout.chunks) and capacity >= len(layout)
        self._devices = form.devices
        if not _loads_ahead(form, layout, {reader.tier for reader in readers}):
            threads = 0
        self._assembly = Assembly(form, layout, readers, capacity, max(2 * threads, 1))
        self._pool = ThreadPoolExecutor(threads, "cacheblend-loader", compute_alone) if threads else None
        self._ahead = ahead if threads else 0
        self._times = times or LayerTimes()
        self._next, self._end = first_layer, form.num_kv_layers
        # Of each layer that was begun its pieces, and what loads each; how many are not loaded, and what is made of all.
        self._tasks: dict[int, list[Future[None] | None]] = {}
        self._lock = threading.Lock()
        self._unfinished: dict[int, int] = {}
        self._ready: dict[int, LayerKV | Upload] = {}
        # What is begun by one thread is finished by another, and what is made in inference mode may be written to in no other.
        self._infers = torch.is_inference_mode_enabled()
        # Of KV as the model takes it; what is resident on its device is not loaded.
        self.load_bytes = 0
        self._host_wait_s = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> LayerLoader:
        self._begin(self._next + self._ahead)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ready.clear()
        if kind is None and self._next >= self._end and not self._tasks:
            self._assembly.end()

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
        result = loaded.receive() if isinstance(loaded, Upload) else loaded
        ended = self._times.handed[layer] = time.perf_counter()
        if waited_from is None:
            self._host_wait_s += ended - started
        else:
            self._stalls.append((waited_from, _mark(device)))
        return result

    def _begin(self, stop: int) -> None:
        """Have threads load the layers before one, in ascending order; without threads who waits for them does."""
        count = len(self._assembly.pieces)
        while self._next < min(stop, self._end):
            layer, self._next = self._next, self._next + 1
            self._unfinished[layer] = count
            self._tasks[layer] = [
                None if self._pool is None else self._pool.submit(self._work, layer, piece) for piece in range(count)
            ]

    def _work(self, layer: int, piece: int) -> None:
        with torch.inference_mode(self._infers):
            self.fetch_kv(layer, piece)

    def fetch_kv(self, layer: int, piece: int) -> None:
        """Load one layer of one piece (CacheBlend, section 6)."""
        self._times.load_began.setdefault(layer, time.perf_counter())
        loaded_bytes = self._assembly.fill(layer, self._assembly.pieces[piece])
        with self._lock:
            self.load_bytes += loaded_bytes
            self._unfinished[layer] -= 1
            if self._unfinished[layer]:
                return
        self._ready[layer] = self._assembly.finish(layer)
        self._times.load_ended[layer] = time.perf_counter()


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
