"""Fetching stored KV layer by layer, ahead of the computation.

While layer i is computed, a thread reads layer i + 1 of every chunk, moves its keys to their position in the prompt and
puts the whole into one buffer (CacheBlend, section 5).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder
from cacheblend_rag.rope import Rotation, RotationTable, shift_keys
from cacheblend_rag.store.base import KVReader

__all__ = ["LayerLoader"]


class LayerLoader:
    """Assembles the chunks of one prompt, layer by layer, in a thread of its own; a context manager.

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
        self._runs = _adjacent_runs(layout)
        self._tables: dict[tuple[Rotation, torch.device], RotationTable | None] = {}
        self._layers = range(first_layer, decoder.num_layers)
        self._ready: dict[int, LayerKV | BaseException] = {}
        self._changed = threading.Condition()
        self._room = threading.Semaphore(ahead + 1)
        self._closed = False
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._work, name="cacheblend-loader", daemon=True)

    def __enter__(self) -> LayerLoader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        with self._changed:
            self._changed.wait_for(lambda: layer in self._ready)
            loaded = self._ready.pop(layer)
        self.wait_s += time.perf_counter() - started
        self._room.release()
        if isinstance(loaded, BaseException):
            raise loaded
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
        table = None if rotation is None else self._table(rotation, device)
        done = 0
        for first, last in self._runs:
            start, stop = self._layout.chunks[first].start, self._layout.chunks[last].stop
            _join([part.keys for part in parts[first : last + 1]], keys[0, :, start:stop])
            _join([part.values for part in parts[first : last + 1]], values[0, :, start:stop])
            if table is not None:
                rows = slice(done, done + stop - start)
                shift_keys(keys[0, :, start:stop], RotationTable(table.cos[rows], table.sin[rows], table.layout))
            done += stop - start
        return LayerKV(keys, values)

    def _table(self, rotation: Rotation, device: torch.device) -> RotationTable | None:
        if (rotation, device) not in self._tables:
            distances = torch.cat(
                [
                    torch.full((len(span),), span.position - reader.start)
                    for span, reader in zip(self._layout.chunks, self._readers, strict=True)
                ]
            )
            self._tables[rotation, device] = rotation.table(distances, device) if distances.any() else None
        return self._tables[rotation, device]


def _adjacent_runs(layout: PromptLayout) -> list[tuple[int, int]]:
    """Group chunks that follow each other without text between: first and last index of each group."""
    runs: list[tuple[int, int]] = []
    for index, (before, span) in enumerate(pairwise([None, *layout.chunks])):
        assert span is not None
        if before is not None and before.stop == span.start:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _join(parts: list[torch.Tensor], into: torch.Tensor) -> None:
    if into.device.type == "cpu":
        torch.cat(parts, dim=1, out=into)
    else:
        into.copy_(torch.cat(parts, dim=1), non_blocking=True)
