"""Moving assembled layers from pinned memory to a CUDA device, beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cacheblend_rag.kv import LayerKV

__all__ = ["Stall", "Upload", "Uploads"]


@dataclass(frozen=True, eq=False)
class Upload:
    """A layer on its way to a device.

    Attributes
    ----------
    layer : LayerKV
        The device's buffers, ``(1, num_kv_heads, capacity, head_dim)``.
    done : torch.cuda.Event or None
        Recorded behind the copy and the rotation; None where both were over when the upload was made.
    """

    layer: LayerKV
    done: torch.cuda.Event | None

    def receive(self) -> LayerKV:
        """Make the current stream wait for the layer, without waiting here, and hand it over."""
        if self.done is not None:
            stream = torch.cuda.current_stream(self.layer.keys.device)
            stream.wait_event(self.done)
            for tensor in self.layer:
                # The memory belongs to the copying stream: without this it could be given out again too early.
                tensor.record_stream(stream)
        return self.layer


class Uploads:
    """Copies layers to their devices, each device in one stream beside that of the computation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(
        self, buffer: LayerKV, rows: slice, device: torch.device, shift: Callable[[torch.Tensor], None]
    ) -> Upload:
        """Begin to copy a layer.

        Parameters
        ----------
        buffer : LayerKV
            The filled buffers, ``(1, num_kv_heads, capacity, head_dim)``, in pinned memory where the device is CUDA. The
            caching allocator of pinned memory keeps them from being used again before the copy is over.
        rows : slice
            The rows that are filled.
        device : torch.device
            Where the layer goes.
        shift : callable
            Rotates the keys on the device.

        Returns
        -------
        Upload
            The layer, to be received in the thread of the computation.
        """
        if device.type != "cuda":
            moved = LayerKV(*(tensor.to(device) for tensor in buffer))
            shift(moved.keys)
            return Upload(moved, None)
        with torch.cuda.stream(self._stream(device)):
            moved = LayerKV(*(torch.empty_like(tensor, device=device) for tensor in buffer))
            for into, tensor in zip(moved, buffer, strict=True):
                # Head by head both sides are contiguous, which is one transfer; a cut of all heads would be copied twice.
                for head in range(tensor.shape[1]):
                    into[0, head, rows].copy_(tensor[0, head, rows], non_blocking=True)
            shift(moved.keys)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Upload(moved, done)

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
