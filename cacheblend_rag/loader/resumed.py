"""Rows that a conversation has KV of, put in front of what the loader assembles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.loader.layers import LayerLoader

__all__ = ["ResumedLayers"]


class ResumedLayers:
    """The layers of a prompt whose first rows are there already.

    Parameters
    ----------
    rows : sequence of LayerKV
        The KV of those rows in each layer, ``(1, num_kv_heads, resumed_rows, head_dim)``, on the layer's device. It is copied.
    loader : LayerLoader or None
        Assembles the chunks behind them, every layer of them; None where there is none.
    capacity : int
        Rows of the buffers, as the loader has them.
    """

    def __init__(self, rows: Sequence[LayerKV], loader: LayerLoader | None, capacity: int) -> None:
        self._rows = rows
        self._loader = loader
        self._capacity = capacity

    def synchronize(self, layer: int) -> LayerKV:
        """Return one layer, waiting until the chunks' part of it is there.

        Parameters
        ----------
        layer : int
            The layer; each once, in ascending order.

        Returns
        -------
        LayerKV
            ``(1, num_kv_heads, capacity, head_dim)``; the resumed rows and those of chunks are filled, all others are undefined.

        Raises
        ------
        ChunkReadError
            If the stored KV of a chunk is gone or damaged.
        """
        held = self._rows[layer]
        whole = self._empty(held) if self._loader is None else self._loader.synchronize(layer)
        for into, rows in zip(whole, held, strict=True):
            into[:, :, : rows.shape[2]] = rows
        return whole

    def _empty(self, sample: LayerKV) -> LayerKV:
        return LayerKV(*(_room(tensor, self._capacity) for tensor in sample))


def _room(sample: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, width = sample.shape
    return sample.new_empty(batch, heads, capacity, width)
