"""Masks for rows that are not contiguous, and attention that skips what they mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cacheblend_rag.model import AttentionFunction

__all__ = ["RowMask", "attend_folded", "attend_in_blocks"]

_BLOCK_ROWS = 64
_MOST_BLOCKS = 8
# A longer prompt's masks are made additive anew in every layer, so that they take no more room than that of one block.
_KEPT_BYTES = 64 << 20
# Of more, the kernel makes good use anyway.
_MOST_FOLDED = 16
_ASKED_BESIDES = ("position_bias", "softcap", "cache")


class RowMask(torch.Tensor):
    """A boolean attention mask, ``(1, heads or 1, rows, columns)``, that knows in blocks of rows where nothing is seen."""

    # A kernel that is given a mask computes every score and drops half of them; a causal flag would be wrong for rows with gaps
    # between them. In a few blocks, each over the columns that any of its rows sees, most of that is saved.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _blocks: list[tuple[slice, slice]]
    """Neighbouring rows, and the columns outside of which none of them sees anything."""
    _additive: tuple[torch.dtype, list[torch.Tensor]] | None

    @classmethod
    def over(cls, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of ascending rows with its blocks, or as it is where blocks would not pay."""
        rows = mask.shape[-2]
        count = min(rows // _BLOCK_ROWS, _MOST_BLOCKS)
        # Measured on the CPU only: on a GPU, more and smaller kernels may cost more than they save.
        if count < 2 or mask.device.type != "cpu" or mask.dtype != torch.bool or mask.ndim != 4 or len(mask) != 1:
            return mask
        known = mask.as_subclass(cls)
        known._blocks = []
        known._additive = None
        for start, stop in pairwise(number * rows // count for number in range(count + 1)):
            seen = mask[:, :, start:stop].any(dim=(1, 2))[0].nonzero()
            if not seen.numel():
                return mask
            known._blocks.append((slice(start, stop), slice(int(seen[0]), int(seen[-1]) + 1)))
        return known

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Compute attention, ``(1, rows, num_heads, head_dim)``, contiguous; shared heads are not copied for each query head."""
        batch, heads, rows = query.shape[:3]
        out = query.new_empty(batch, rows, heads, value.shape[-1])
        for (block, columns), mask in zip(self._blocks, self._masks(query.dtype), strict=True):
            part = functional.scaled_dot_product_attention(
                query[:, :, block],
                key[:, :, columns],
                value[:, :, columns],
                attn_mask=mask,
                scale=scale,
                enable_gqa=heads != key.shape[1],
            )
            out[:, block] = part.transpose(1, 2)
        return out

    def _masks(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each block's mask, additive where there is room: kernels want it so, and many layers have the same mask."""
        if self._additive is None or self._additive[0] != dtype:
            masks = [self[:, :, block, columns] for block, columns in self._blocks]
            if sum(mask.numel() for mask in masks) * dtype.itemsize > _KEPT_BYTES:
                return masks
            added = [mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf) for mask in masks]
            self._additive = dtype, added
        return self._additive[1]


def attend_in_blocks(
    function: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend by a `RowMask` in transformers' own ``sdpa``, and by `function` otherwise; for `replace_attention`."""
    if (
        isinstance(attention_mask, RowMask)
        and attention_mask.shape[-2:] == (query.shape[2], key.shape[2])
        and _is_plain(function, args, kwargs)
    ):
        return attention_mask.attend(query, key, value, kwargs.get("scaling")), None
    return function(module, query, key, value, attention_mask, *args, **kwargs)


def attend_folded(
    function: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend from few rows in transformers' own ``sdpa``, and by `function` otherwise; for `replace_attention`, on a CPU.

    The heads that share KV are rows of one head: torch's kernel reads the KV once for all of them, and is slow for single rows.
    """
    batch, heads, rows, width = query.shape
    shared = key.shape[1]
    is_masked = isinstance(attention_mask, torch.Tensor) and attention_mask.shape[1:3] == (1, rows)
    is_small = rows <= _MOST_FOLDED and heads > shared and (is_masked or (rows == 1 and attention_mask is None))
    if not is_small or not _is_plain(function, args, kwargs):
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    out = functional.scaled_dot_product_attention(
        query.reshape(batch, shared, -1, width),
        key,
        value,
        attn_mask=None if attention_mask is None else attention_mask.repeat(1, 1, heads // shared, 1),
        scale=kwargs.get("scaling"),
    )
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _is_plain(function: AttentionFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    asked = args or kwargs.get("dropout") or any(kwargs.get(name) is not None for name in _ASKED_BESIDES)
    return function is sdpa_attention_forward and not asked
