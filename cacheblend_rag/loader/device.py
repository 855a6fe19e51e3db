"""Making layers on a CUDA device, beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.device import Upload

__all__ = ["Stall", "Uploads"]


class Uploads:
    """Makes layers on their devices, each device in one stream beside that of the computation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, device: torch.device, make: Callable[[], LayerKV]) -> Upload:
        """Begin to make a layer on its device.

        Parameters
        ----------
        device : torch.device
            Where the layer goes.
        make : callable
            Gives the device its work: copies that do not wait, and what is computed there. What is copied from pinned memory
            may be let go at once, since its caching allocator waits for the copy.

        Returns
        -------
        Upload
            The layer, to be received in the thread of the computation.
        """
        if device.type != "cuda":
            return Upload(make(), None)
        with torch.cuda.stream(self._stream(device)):
            layer = make()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Upload(layer, done)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]


class Stall:
    """The time in which a CUDA stream had nothing to do but wait for a layer.

    The thread that gives a CUDA device its work runs ahead of it, so how long that thread waits says little.

    Parameters
    ----------
    device : torch.device
        The CUDA device; from now on, once its current stream has done what it was given, it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end: torch.cuda.Event | None = None

    def end(self) -> None:
        """Say that the stream has been told to wait for the layer and has nothing else to wait for."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return the time in seconds, waiting until it is known; 0 where it never ended."""
        if self._end is None:
            return 0.0
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
