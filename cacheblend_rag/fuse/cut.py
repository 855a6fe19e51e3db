"""Cutting what a decoder layer is called with to some rows of the prompt."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.mask import RowMask
from cacheblend_rag.model import Decoder

__all__ = ["RowCutter"]

_MASK = "attention_mask"
# What generate hands over besides, and models pass on to their layers.
_GENERATION_AXES = {"position_ids": -1, "cache_position": -1}


class RowCutter:
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


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
