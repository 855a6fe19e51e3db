"""Steering a model's own forward so that only the selected rows are computed.

A pre-hook on every decoder layer cuts what the layer is given to the rows that are still computed; the cache scatters
their fresh KV into the layer's assembled chunk KV and hands the whole of it to the model's own attention. Nothing of a
layer is re-implemented, so whatever the model does (norms, soft caps, experts, residual scales) is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.cut import RowCutter
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, KVCache
from cacheblend_rag.selection import Selection

__all__ = ["BlendCache", "LayerSource", "Steering"]


class LayerSource(Protocol):
    """Where the assembled chunk KV of each layer comes from."""

    def synchronize(self, layer: int) -> LayerKV:
        """Return one layer, waiting until it is there (CacheBlend, section 6); layers are asked for once each, in
        ascending order.

        Returns
        -------
        LayerKV
            Buffers ``(1, num_kv_heads, capacity, head_dim)`` on the layer's device with every chunk row filled, keys
            rotated to their position in the prompt. The caller owns them and fills the other rows.
        """


class BlendCache(KVCache):
    """The cache of one prompt: `steering` guides its prefill, and afterwards it is an ordinary cache."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.steering: Steering | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store fresh KV and return all of the layer."""
        if self.steering is not None:
            return self.steering.scatter(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Probed(Exception):
    """Carries a layer's fresh KV out of its forward."""

    def __init__(self, kv: LayerKV) -> None:
        super().__init__()
        self.kv = kv


class _ProbeCache(KVCache):
    """Leaves the layer as soon as it has computed its keys and values, before its attention and MLP are paid for."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise _Probed(LayerKV(key_states, value_states))


class Steering:
    """One blended prefill under way.

    Parameters
    ----------
    decoder : Decoder
        The model.
    cache : BlendCache
        An empty cache; it is filled with the blended KV of the whole prompt.
    layout : PromptLayout
        The prompt.
    selection : Selection
        Chooses the rows.
    source : LayerSource
        The chunks' stored KV.

    Attributes
    ----------
    charge : float
        Work done on chunk rows so far, in decoder-block rows.
    recomputed_rows : torch.Tensor
        The chunk rows computed by the last layer so far.
    """

    def __init__(
        self, decoder: Decoder, cache: BlendCache, layout: PromptLayout, selection: Selection, source: LayerSource
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._layout = layout
        self._selection = selection
        self._source = source
        self._context_tokens = layout.context_tokens
        self._text_rows = layout.text_rows.to(decoder.device)
        self._chosen = layout.candidate_rows.to(decoder.device)
        self._rows: torch.Tensor | None = None  # None: every row of the prompt is computed
        self._stored: dict[int, LayerKV] = {}
        self._cutter = RowCutter(type(decoder.model).__name__, len(layout))
        self.charge = 0.0

    @property
    def recomputed_rows(self) -> torch.Tensor:
        """The chunk rows that the current layer computes, ascending."""
        return self._chosen

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hook the decoder layers for the duration of a ``with`` block; they act on calls with this cache only."""
        hooks = [
            layer.register_forward_pre_hook(partial(self._before_layer, number), with_kwargs=True)
            for number, layer in enumerate(self._decoder.layers)
        ]
        self._cache.steering = self
        try:
            yield
        finally:
            self._cache.steering = None
            for hook in hooks:
                hook.remove()

    def _before_layer(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._cache.steering is not self:
            return None
        names = self._decoder.layer_parameters
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if not any(value is self._cache for value in arguments.values()):
            return None
        arguments = self.prefill_layer(layer, module, arguments)
        return tuple(arguments.pop(name) for name in names[: len(args)]), arguments

    def prefill_layer(self, layer: int, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Narrow the computed rows where this layer is one to do so, and cut the layer's arguments to them (CacheBlend,
        section 6).

        Parameters
        ----------
        layer : int
            The layer about to run.
        module : nn.Module
            That layer.
        arguments : dict
            What it was called with, by name.

        Returns
        -------
        dict
            What it is to be called with.
        """
        before = self._rows
        if layer in self._selection.check_layers:
            self._check(layer, module, arguments)
        elif layer == 0 and not self._selection.check_layers:
            self._go_on_with(self._selection.rows().to(self._decoder.device))
        computed = self._context_tokens if self._rows is None else self._chosen.numel()
        self.charge += computed
        return self._cutter.cut(arguments, before, self._rows)

    def _check(self, layer: int, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Compute this layer's KV for every row in the race, and let the selection compare it with the stored KV."""
        probe = _ProbeCache(self._decoder.num_layers)
        probed = {
            name: probe if value is self._cache else value
            for name, value in self._cutter.cut(arguments, self._rows, self._rows).items()
        }
        try:
            module.forward(**probed)
        except _Probed as caught:
            fresh = caught.kv
        else:
            raise UnsupportedModelError(
                f"{type(self._decoder.model).__name__}, layer {layer}: it did not hand its KV to the cache"
            )
        candidates = self._chosen
        self.charge += self._decoder.probe_share * (self._context_tokens if self._rows is None else candidates.numel())
        stored = self._source.synchronize(layer)
        device = stored.keys.device
        where = candidates if self._rows is None else torch.searchsorted(self._rows, candidates)
        kept = self._selection.narrow(
            layer,
            candidates,
            LayerKV(*(tensor.index_select(2, where.to(device)) for tensor in fresh)),
            LayerKV(*(tensor.index_select(2, candidates.to(device)) for tensor in stored)),
        )
        # What the probe computed is fresher than what is stored, for the rows that drop out as well.
        self._write(stored, self._rows, fresh)
        self._stored[layer] = stored
        self._go_on_with(kept)

    def _go_on_with(self, chosen: torch.Tensor) -> None:
        self._chosen = chosen
        self._rows = torch.cat((self._text_rows, chosen)).sort().values

    def scatter(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge freshly computed rows into the layer's chunk KV and return the layer's KV for the whole prompt.

        Parameters
        ----------
        layer : int
            The layer that computed them.
        keys, values : torch.Tensor
            Fresh KV of the rows now computed, ``(1, num_kv_heads, rows, head_dim)``.

        Returns
        -------
        tuple of torch.Tensor
            Keys and values, ``(1, num_kv_heads, prompt_len, head_dim)``.
        """
        held = self._cache.kv_layers[layer]
        if self._rows is None:
            return held.update(keys, values)
        whole = self._stored.pop(layer, None) or self._source.synchronize(layer)
        self._write(whole, self._rows, LayerKV(keys, values))
        if layer == self._decoder.num_layers - 1:
            self._cache.steering = None
        return held.hold(whole, len(self._layout))

    @staticmethod
    def _write(whole: LayerKV, rows: torch.Tensor | None, fresh: LayerKV) -> None:
        for into, new in zip(whole, fresh, strict=True):
            if rows is None:
                into[:, :, : new.shape[2]] = new
            else:
                into.index_copy_(2, rows.to(into.device), new)
