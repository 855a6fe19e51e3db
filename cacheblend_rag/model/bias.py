"""Models that add to their scores what depends on the distance of two tokens (ALiBi), on prompts with gaps.

Such a model counts the tokens in its cache and takes no positions. What it adds is linear in the column, which is also how it is
recognised; the table is moved to the true position of each column (Prompt Cache, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model.arguments import layer_parameters
from cacheblend_rag.model.cache import KVCache

__all__ = ["biases_at", "column_biases"]

_TOKENS = 7
# ALiBi is made in bfloat16 by some.
_TOLERANCE = 2e-2


@torch.no_grad()
def column_biases(
    decoder: nn.Module, layers: Sequence[nn.Module], ids: Callable[[int], torch.Tensor]
) -> tuple[str, ...]:
    """Return the arguments of a model's decoder layers that are added to scores and linear in the column.

    Parameters
    ----------
    decoder : nn.Module
        The part of a model that its head stands on.
    layers : sequence of nn.Module
        Its decoder layers.
    ids : callable
        Returns so many token ids, ``(1, count)``.
    """
    found: list[str] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(layer_parameters(module), args, strict=False)) | kwargs
        found.extend(name for name, value in arguments.items() if _is_linear(value))

    hook = layers[0].register_forward_pre_hook(before, with_kwargs=True)
    try:
        decoder(input_ids=ids(_TOKENS), past_key_values=KVCache(len(layers)), use_cache=True)
    finally:
        hook.remove()
    return tuple(found)


@contextmanager
def biases_at(
    layers: Sequence[nn.Module], names: Sequence[str], cache: KVCache, positions: Sequence[int]
) -> Iterator[None]:
    """Add for the duration of a ``with`` block what belongs to the true positions; calls with another cache are left alone.

    Parameters
    ----------
    layers : sequence of nn.Module
        The decoder layers.
    names : sequence of str
        From `column_biases`.
    cache : KVCache
        The cache of the one sequence that is run.
    positions : sequence of int
        The position of each of its first tokens; those behind follow the last one without gaps.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    first = len(positions)

    def before(
        number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        parameters = layer_parameters(module)
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        if not any(value is cache for value in arguments.values()):
            return None
        held = cache.kv_layers[number].get_seq_length()
        columns = held + 1 if held else first
        for name in names:
            bias = arguments.get(name)
            if bias is None:
                continue
            # Most models hand one object to all their layers; the one kept here keeps its id from being given to another.
            known = moved.get(id(bias))
            if known is None or known[0] is not bias:
                if len(moved) > len(layers) * len(names):
                    moved.clear()
                known = moved[id(bias)] = (bias, _moved(bias, columns, positions))
            arguments[name] = known[1]
        return tuple(arguments.pop(name) for name in parameters[: len(args)]), arguments

    # Columns that are all shifted alike leave the attention as it is.
    is_needed = bool(names) and any(place - number != positions[0] for number, place in enumerate(positions))
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, number=number: before(number, module, args, kwargs), with_kwargs=True
        )
        for number, layer in enumerate(layers if is_needed else ())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _moved(bias: torch.Tensor, columns: int, positions: Sequence[int]) -> torch.Tensor:
    if bias.shape[-1] < columns:
        raise UnsupportedModelError(
            f"a bias of {bias.shape[-1]} columns cannot be placed in a prompt with gaps that has {columns} tokens"
        )
    bias = bias[..., -columns:]
    count = min(len(positions), columns)
    distances = [positions[number] - number for number in range(count)]
    distances += [distances[-1]] * (columns - count)
    slope = _slopes(bias, columns)
    offsets = torch.tensor(distances, dtype=torch.float32, device=bias.device)
    return (bias.float() + slope * offsets).to(bias.dtype) if columns > 1 else bias


def _slopes(bias: torch.Tensor, columns: int) -> torch.Tensor:
    """Return what the last row, of which no column is masked, grows by from one column to the next, ``(..., 1, 1)``."""
    last = bias[..., -1:, -columns:].float()
    return (last[..., -1:] - last[..., :1]) / max(columns - 1, 1)


def _is_linear(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 3:
        return False
    if value.shape[-1] < _TOKENS:
        return False
    slopes = _slopes(value, _TOKENS)
    last = value[..., -1:, -_TOKENS:].float()
    line = last[..., :1] + slopes * torch.arange(_TOKENS, device=value.device)
    size = slopes.abs().amax()
    return bool(torch.isfinite(last).all() and size > 0 and ((last - line).abs() <= _TOLERANCE * size * _TOKENS).all())
