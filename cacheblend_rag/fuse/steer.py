"""Steering a model's own forward so that only the selected rows are computed.

A pre-hook on every decoder layer cuts what the layer is given to the rows that are still computed; the cache scatters
their fresh KV into the layer's assembled chunk KV and hands the whole of it to the model's own attention. Nothing of a
layer is re-implemented, so whatever the model does (norms, soft caps, experts, residual scales) is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.mask import RowMask, attend_in_blocks
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import (
    AttentionCall,
    Decoder,
    KVCache,
    attention_weights,
    before_layers,
    replace_attention,
    watch_attention,
)
from cacheblend_rag.selection import LayerProbe, Selection

__all__ = ["BlendCache", "LayerSource", "Steering"]

_MASK = "attention_mask"
# What generate hands over besides, and models pass on to their layers.
_GENERATION_AXES = {"position_ids": -1, "cache_position": -1}

LayerSource = Callable[[int], LayerKV]
"""Returns the assembled chunk KV of one layer, waiting until it is there (`LayerLoader.synchronize`).

Layers are asked for once each, in ascending order. They are buffers ``(1, num_kv_heads, capacity, head_dim)`` on the layer's
device with every chunk row filled, keys rotated to their position in the prompt. The caller owns them and fills the other rows.
"""


class BlendCache(KVCache):
    """The cache of one prompt: `steering` guides its prefill, and afterwards it is an ordinary cache."""

    steering: Steering | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store fresh KV and return all of the layer."""
        if self.steering is not None:
            return self.steering.scatter(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _LayerLeft(Exception):
    """Leaves a layer's forward before what is not wanted of it is paid for."""


class _ProbingCache(KVCache):
    """A cache that hands a layer's fresh KV to `probe`, and whatever `probe` returns to the layer's attention."""

    def __init__(self, num_layers: int, probe: Callable[[LayerKV], LayerKV]) -> None:
        super().__init__(num_layers)
        self._probe = probe

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._probe(LayerKV(key_states, value_states))


class _RowCutter:
    """Cuts the arguments of decoder layers that were made for a whole prompt of `length` rows."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self._model_name = type(decoder.model).__name__
        self._length = length
        self._axes: dict[str, int | None] = {**_GENERATION_AXES, **decoder.row_axes}
        self._states = decoder.states
        self.states_axis = decoder.row_axes[decoder.states] or -2
        self._rows: torch.Tensor | None = None
        self._known: dict[tuple[str, int], tuple[Any, Any]] = {}

    def cut(
        self, arguments: dict[str, Any], before: torch.Tensor | None, rows: torch.Tensor | None, is_last: bool = False
    ) -> dict[str, Any]:
        """Return a layer's arguments, those with a row axis cut to `rows`, None for all; states have the rows `before`."""
        if rows is None:
            return arguments
        if rows is not self._rows:
            self._rows = rows
            self._known.clear()
        cut: dict[str, Any] = {}
        for name, value in arguments.items():
            if name == self._states:
                if before is rows:
                    cut[name] = value
                else:
                    keep = rows if before is None else torch.searchsorted(before, rows)
                    cut[name] = value.index_select(self.states_axis, keep.to(value.device))
                continue
            # The model hands the same objects to every layer; the reference kept here keeps the id from being reused.
            known = (name, id(value))
            if known not in self._known:
                device = arguments[self._states].device
                made = self._mask(value, rows, device) if name == _MASK else self._value(name, value, rows)
                self._known[known] = (value, made)
            cut[name] = self._known[known][1]
        if is_last:
            # No other layer will ask, and masks are large.
            self._rows = None
            self._known.clear()
        return cut

    def _mask(self, mask: Any, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        if mask is None:
            # The model relied on the attention kernel's causal flag, which is wrong for rows that are not contiguous.
            seen = torch.arange(self._length, device=device) <= rows.to(device)[:, None]
            return RowMask.over(seen[None, None])
        if isinstance(mask, torch.Tensor) and mask.ndim > 2 and mask.shape[-2] == self._length:
            return RowMask.over(mask.index_select(-2, rows.to(mask.device)))
        raise UnsupportedModelError(f"{self._model_name}: its layers take a mask of an unknown form, {_describe(mask)}")

    def _value(self, name: str, value: Any, rows: torch.Tensor) -> Any:
        if isinstance(value, torch.Tensor):
            axis = self._axes.get(name)
            if axis is None and (name in self._axes or self._length not in value.shape):
                return value
            if axis is None or value.shape[axis] != self._length:
                raise UnsupportedModelError(
                    f"{self._model_name}: its layers take {name}, {_describe(value)}, which cannot be cut to rows"
                )
            return value.index_select(axis, rows.to(value.device))
        if isinstance(value, tuple | list) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(self._value(f"{name}.{index}", item, rows) for index, item in enumerate(value))
        # A mapping is a place where layers leave their KV for others (Gemma 3n); what is in it is whole.
        return value


class Steering:
    """One blended prefill under way.

    The cache is empty, and filled with the blended KV of the whole prompt. `text_rows`, ascending, are computed whatever is
    selected, by default all that are not of a chunk; all others must be in the source.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: BlendCache,
        layout: PromptLayout,
        selection: Selection,
        source: LayerSource,
        text_rows: torch.Tensor | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._selection = selection
        self._source = source
        self._context_tokens = layout.context_tokens
        self._length = len(layout)
        self._question_tokens = len(layout) - (layout.chunks[-1].stop if layout.chunks else layout.resumed_rows)
        self._candidates = layout.context_rows.to(decoder.device)
        self._text_rows = (layout.text_rows if text_rows is None else text_rows).to(decoder.device)
        self._chosen = self._candidates
        # All that may be computed; None: every row of the prompt.
        self._every: torch.Tensor | None = None
        if layout.resumed_rows:
            self._every = torch.arange(layout.resumed_rows, len(layout), device=decoder.device)
        self._rows = self._every
        self._stored: dict[int, LayerKV] = {}
        self._cutter = _RowCutter(decoder, len(layout))
        self._is_last_under_way = False
        # Work done on chunk rows so far, in decoder-block rows; what was done on text only to select is part of it.
        self.charge = 0.0
        # The chunk rows that the last layer to compute any has computed, ascending.
        self.recomputed_rows = self._candidates

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hook the decoder layers for the duration of a ``with`` block; they act on calls with this cache only."""
        hook = self._decoder.layers[-1].register_forward_hook(self._after_last_layer, with_kwargs=True)
        self._cache.steering = self
        try:
            with (
                before_layers(self._decoder.layers, self.prefill_layer),
                replace_attention(attend_in_blocks) if self._decoder.device.type == "cpu" else nullcontext(),
            ):
                yield
        finally:
            self._cache.steering = None
            hook.remove()

    def prefill_layer(self, layer: int, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Narrow the rows where this layer does so, and cut its arguments to them (CacheBlend, section 6), or None for none."""
        if self._cache.steering is not self or not any(value is self._cache for value in arguments.values()):
            return None
        selection = self._selection
        # The model embeds the whole prompt.
        before = self._rows if layer else None
        count = self._length if self._rows is None else self._rows.numel()
        narrowed = arguments[self._decoder.states].shape[self._cutter.states_axis] != count
        if narrowed and layer >= self._decoder.num_kv_layers:
            # The model itself goes on with fewer rows, where layers attend to the KV of others (Gemma 4).
            self._cache.steering = None
            return None
        if layer in selection.check_layers:
            self._check(layer, arguments)
        elif layer == 0 and selection.rows is not None:
            self._go_on_with(selection.rows)
        if layer == selection.stop_layer:
            self._rows = self._text_rows
            self._chosen = self._candidates[:0]
        self.charge += self._context_tokens if self._rows is self._every else self._chosen.numel()
        if layer == self._decoder.num_layers - 1:
            self._is_last_under_way = True
            if layer >= self._decoder.num_kv_layers:
                # The last layer attends to the KV of another one; none is handed over any more.
                self._cache.steering = None
        # Who keeps this for the decoding needs no masks of the prompt.
        return self._cutter.cut(arguments, before, self._rows, is_last=self._is_last_under_way)

    def _after_last_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Put the computed rows back to their place, since some models go on with all of them; the others are zero."""
        is_own = any(value is self._cache for value in (*args, *kwargs.values()))
        if not self._is_last_under_way or self._rows is None or not is_own:
            return None
        self._is_last_under_way = False
        states = output[0] if isinstance(output, tuple) else output
        axis = self._cutter.states_axis
        shape = list(states.shape)
        shape[axis] = self._length
        whole = states.new_zeros(shape).index_copy_(axis, self._rows.to(states.device), states)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _check(self, layer: int, arguments: dict[str, Any]) -> None:
        """Compute this layer's KV of the rows in the race, have the selection compare it, and leave once it has what it needs."""
        candidates = self._chosen
        handed: list[tuple[LayerKV, LayerKV, LayerKV]] = []
        calls: list[AttentionCall] = []

        def take(fresh: LayerKV) -> LayerKV:
            stored = self._source(layer)
            handed.append((fresh, stored, _rows_of(stored, candidates)))
            # What was computed is fresher than what is stored, for the rows that drop out as well.
            self._write(stored, self._rows, fresh)
            if not self._selection.wants_attention:
                raise _LayerLeft
            # The mask has a column for every row of the prompt, and so must the keys, whichever rows are computed.
            return LayerKV(*(tensor[:, :, : self._length] for tensor in stored))

        def leave(call: AttentionCall) -> None:
            calls.append(call)
            raise _LayerLeft

        probe = _ProbingCache(self._decoder.num_layers, take)
        arguments = self._cutter.cut(arguments, self._rows, self._rows)
        arguments = {name: probe if each is self._cache else each for name, each in arguments.items()}
        with suppress(_LayerLeft), watch_attention(leave, before=True):
            self._decoder.layers[layer].forward(**arguments)
        if not handed or (self._selection.wants_attention and not calls):
            raise UnsupportedModelError(
                f"{type(self._decoder.model).__name__}, layer {layer}: it did not pass its KV to the cache"
            )
        [(fresh, stored, found)] = handed
        all_rows = self._rows is self._every
        self.charge += self._decoder.probe_share * (self._context_tokens if all_rows else candidates.numel())
        where = candidates if self._rows is None else torch.searchsorted(self._rows, candidates)
        attention = None
        if calls:
            heads, _, width = calls[0].query.shape[1:]
            scores = 2 * heads * width * self._question_tokens * calls[0].key.shape[2]
            self.charge += scores / self._decoder.row_flops
            weights = attention_weights(calls[0], self._question_tokens)
            attention = weights.index_select(2, candidates.to(weights.device))
        assert self._selection.narrow is not None
        self._stored[layer] = stored
        self._go_on_with(
            self._selection.narrow(LayerProbe(layer, candidates, _rows_of(fresh, where), found, attention))
        )

    def _go_on_with(self, chosen: torch.Tensor) -> None:
        self._chosen = self.recomputed_rows = chosen.to(self._text_rows.device)
        self._rows = torch.cat((self._text_rows, self._chosen)).sort().values

    def scatter(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge fresh rows, ``(1, num_kv_heads, rows, head_dim)``, into the layer's chunk KV; return that of the whole prompt."""
        held = self._cache.kv_layers[layer]
        if self._rows is None:
            return held.update(keys, values)
        whole = self._stored.pop(layer, None) or self._source(layer)
        self._write(whole, self._rows, LayerKV(keys, values))
        if layer == self._decoder.num_layers - 1:
            self._cache.steering = None
        return held.hold(whole, self._length)

    @staticmethod
    def _write(whole: LayerKV, rows: torch.Tensor | None, fresh: LayerKV) -> None:
        for into, new in zip(whole, fresh, strict=True):
            if rows is None:
                into[:, :, : new.shape[2]] = new
            else:
                into.index_copy_(2, rows.to(into.device), new)


def _rows_of(layer: LayerKV, rows: torch.Tensor) -> LayerKV:
    """Return a copy of some rows."""
    return LayerKV(*(tensor.index_select(2, rows.to(tensor.device)) for tensor in layer))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
