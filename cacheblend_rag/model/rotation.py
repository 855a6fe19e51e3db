"""Finding out, from a model's own keys, how each of its layers rotates them.

Model families differ in the pairing of dimensions, in how much of a head is rotated, in scaling, and in which layers
rotate at all, and the code that says so is spread over their files. The keys themselves tell: a token that stands alone
attends to itself only, so between two positions nothing but the rotation changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model.cache import KVCache
from cacheblend_rag.rope import Rotation, shift_keys

__all__ = ["find_rotations"]

_LAYOUTS: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")


def find_rotations(model: PreTrainedModel, singles: Mapping[int, KVCache]) -> tuple[Rotation | None, ...]:
    """Return how each layer rotates its keys.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its rotary frequencies are the buffers whose names end in ``inv_freq``.
    singles : mapping of int to KVCache
        The KV of one and the same token run alone at several positions; 0 must be among them.

    Returns
    -------
    tuple of (Rotation or None)
        One for each layer, equal ones being the same object; None where keys do not depend on the position.

    Raises
    ------
    UnsupportedModelError
        If a layer's keys depend on the position in another way, or its values depend on it at all.
    """
    candidates = _candidates(model)
    origin = singles[0].kv()
    others = [(position, cache.kv()) for position, cache in singles.items() if position]
    tolerance = 1e-3 if origin[0].keys.dtype == torch.float32 else 5e-2
    found: list[Rotation | None] = []
    for layer, (keys, values) in enumerate(origin):
        if any(_distance(values, kv[layer].values) > tolerance for _, kv in others):
            raise UnsupportedModelError(
                f"{type(model).__name__}, layer {layer}: the values it stores depend on the position (learned positions, for "
                "example), so they cannot be moved"
            )
        moved = [(position, kv[layer].keys) for position, kv in others]
        if all(_distance(keys, there) <= tolerance for _, there in moved):
            found.append(None)
            continue
        errors = [max(_distance(_shifted(keys, rotation, p), there) for p, there in moved) for rotation in candidates]
        best = min(range(len(errors)), key=errors.__getitem__, default=None)
        if best is None or errors[best] > tolerance:
            raise UnsupportedModelError(
                f"{type(model).__name__}, layer {layer}: its keys depend on the position, but not by a rotation with the "
                "model's own frequencies (learned positions, or a rotary embedding of an unknown kind)"
            )
        found.append(candidates[best])
    return tuple(found)


def _candidates(model: PreTrainedModel) -> list[Rotation]:
    frequencies: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if not leaf.endswith("inv_freq") or "original" in leaf or buffer.ndim != 1:
            continue
        if not any(torch.equal(buffer, known) for known in frequencies):
            frequencies.append(buffer)
    return [Rotation(frequency.detach().float().cpu(), layout) for frequency in frequencies for layout in _LAYOUTS]


def _shifted(keys: torch.Tensor, rotation: Rotation, distance: int) -> torch.Tensor:
    if rotation.rotary_dim > keys.shape[-1]:
        return torch.full_like(keys, torch.inf)
    moved = keys.to(torch.float32, copy=True)
    shift_keys(moved, rotation.table(torch.tensor([distance]), keys.device))
    return moved


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the scale of `b`."""
    scale = b.float().abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    return float((a.float() - b.float()).abs().amax() / scale)
