"""Handing stored KV to the computation layer by layer, loaded by threads that stay a few layers ahead.

While layer i is computed, threads read layer i + 1 of every chunk, check and decode it, move its keys to their position in
the prompt and put the whole into one buffer (CacheBlend, section 5).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Sequence

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader.assembly import Assembly, KVForm, Upload
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.trace import LayerTimes

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

    The work is cut into pieces, some chunks of one layer each, in ascending order of layers. Each thread takes the next
    piece that is within the window, `ahead` layers before they are asked for; a thread that waits for a layer takes pieces
    of it as well. With no threads, and where layers are small, that is all. Layers before `first_layer` are computed in
    full and need no stored KV; rows of `capacity` beyond the prompt are room for generated tokens.
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
        self._ahead = ahead if threads else 0
        self._times = times or LayerTimes()
        self._changed = threading.Condition()
        # All of these are guarded by `_changed`.
        self._next = (first_layer, 0)
        self._wanted = first_layer - 1
        self._end = form.num_kv_layers
        self._unfinished: dict[int, int] = {}
        self._ready: dict[int, LayerKV | Upload] = {}
        self._error: BaseException | None = None
        self._closed = False
        # What is begun by one thread is finished by another, and what is made in inference mode may be written to in no other.
        self._infers = torch.is_inference_mode_enabled()
        # Of KV as the model takes it; what is resident on its device is not loaded.
        self.load_bytes = 0
        self._host_wait_s = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._threads = [
            threading.Thread(target=self._work, name=f"cacheblend-loader-{number}", daemon=True)
            for number in range(threads)
        ]

    def __enter__(self) -> LayerLoader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._ready.clear()
        if kind is None and self._error is None and self._next[0] >= self._end and not self._unfinished:
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
        with self._changed:
            self._wanted = layer
            self._changed.notify_all()
        while True:
            with self._changed:
                # No thread is idle while a layer is waited for: this one loads what no other has begun.
                while layer not in self._ready and self._error is None and self._next[0] > layer:
                    self._changed.wait()
                if layer in self._ready:
                    loaded = self._ready.pop(layer)
                    break
                if self._error is not None:
                    raise self._error
                task = self._begin()
            self.fetch_kv(*task)
        result = loaded.receive() if isinstance(loaded, Upload) else loaded
        ended = self._times.handed[layer] = time.perf_counter()
        if waited_from is None:
            self._host_wait_s += ended - started
        else:
            self._stalls.append((waited_from, _mark(device)))
        return result

    def _work(self) -> None:
        compute_alone()
        while True:
            with self._changed:
                while True:
                    layer, _ = self._next
                    if self._closed or self._error is not None or layer >= self._end:
                        return
                    if layer <= self._wanted + self._ahead:
                        break
                    self._changed.wait()
                task = self._begin()
            with torch.inference_mode(self._infers):
                self.fetch_kv(*task)

    def _begin(self) -> tuple[int, int]:
        layer, piece = self._next
        if not piece:
            self._times.load_began[layer] = time.perf_counter()
        count = len(self._assembly.pieces)
        self._unfinished.setdefault(layer, count)
        self._next = (layer, piece + 1) if piece + 1 < count else (layer + 1, 0)
        return layer, piece

    def fetch_kv(self, layer: int, piece: int) -> None:
        """Load one layer of one piece (CacheBlend, section 6); what goes wrong is raised where the layer is waited for."""
        try:
            loaded_bytes = self._assembly.fill(layer, self._assembly.pieces[piece])
            with self._changed:
                self.load_bytes += loaded_bytes
                self._unfinished[layer] -= 1
                if self._unfinished[layer]:
                    return
                del self._unfinished[layer]
            finished = self._assembly.finish(layer)
            self._times.load_ended[layer] = time.perf_counter()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        else:
            with self._changed:
                self._ready[layer] = finished
                self._changed.notify_all()


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
