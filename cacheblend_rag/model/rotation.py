"""Finding out, from a model's own keys, how each of its layers rotates them.

Model families differ in the pairing of dimensions, in how much of a head is rotated, in scaling, and in which layers
rotate at all, and the code that says so is spread over their files. The keys themselves tell: a token that stands alone
attends to itself only, so between two positions nothing but the rotation changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from transformers import PreTrainedModel

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.rope import Rotation, shift_keys

__all__ = ["find_rotations"]

_LAYOUTS: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
_DEFAULT_BASE = 10000.0


def find_rotations(
    model: PreTrainedModel, singles: Mapping[int, Sequence[LayerKV]]
) -> tuple[Rotation | None, ...] | None:
    """Return how each layer rotates its keys.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its rotary frequencies are the buffers whose names end in ``inv_freq``, or those of the usual formula.
    singles : mapping of int to sequence of LayerKV
        The KV of the same tokens, each run alone, at several positions; 0 must be among them.

    Returns
    -------
    tuple of (Rotation or None), or None
        One for each layer, equal ones being the same object; None where a layer's KV does not depend on the position. None
        instead of the tuple if that of some layer depends on it in another way: positions are learned, for example.
    """
    candidates = [*_own(model), *_usual(model, singles[0])]
    positions = [position for position in singles if position]
    found: list[Rotation | None] = []
    for layer, origin in enumerate(singles[0]):
        there = {position: singles[position][layer] for position in positions}
        tolerance = 1e-3 if origin.keys.dtype == torch.float32 else 5e-2
        moving = [
            part
            for part, name in enumerate(LayerKV._fields)
            if any(_distance(origin[part], kv[part]) > tolerance for kv in there.values())
        ]
        if not moving:
            found.append(None)
            continue
        best = _best(candidates, origin[moving[0]], {at: kv[moving[0]] for at, kv in there.items()}, tolerance)
        if len(moving) > 1 or best is None:
            return None
        found.append(best if moving[0] == 0 else _of_values(best, found))
    return tuple(found)


def _best(
    candidates: Sequence[Rotation], origin: torch.Tensor, there: Mapping[int, torch.Tensor], tolerance: float
) -> Rotation | None:
    """Return the rotation that takes `origin` nearest to what it is at other positions, if that is near enough."""
    errors = [
        max(_distance(_shifted(origin, rotation, at), moved) for at, moved in there.items()) for rotation in candidates
    ]
    best = min(range(len(errors)), key=errors.__getitem__, default=None)
    return None if best is None or errors[best] > tolerance else candidates[best]


def _of_values(rotation: Rotation, known: Sequence[Rotation | None]) -> Rotation:
    for each in known:
        if each is not None and each.inv_freq is rotation.inv_freq and each.layout == rotation.layout:
            return each
    return Rotation(rotation.inv_freq, rotation.layout, "values")


def _own(model: PreTrainedModel) -> list[Rotation]:
    """Return rotations by the frequencies that the model holds."""
    frequencies: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if not leaf.endswith("inv_freq") or "original" in leaf or buffer.ndim != 1:
            continue
        if not any(torch.equal(buffer, known) for known in frequencies):
            frequencies.append(buffer)
    # Copies: with "longrope" scaling a model changes its own in place.
    return _rotations([frequency.detach().float().cpu().clone() for frequency in frequencies])


def _usual(model: PreTrainedModel, kv: Sequence[LayerKV]) -> list[Rotation]:
    """Return rotations by the usual formula, for models that hold tables of sines instead of frequencies (GPT-J)."""
    config = model.config.get_text_config(decoder=True)
    widths = {part.shape[-1] for layer in kv for part in layer} | {getattr(config, "rotary_dim", None) or 0}
    base = float(getattr(config, "rope_theta", None) or _DEFAULT_BASE)
    return _rotations(
        [
            base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width).float()
            for width in sorted(widths)
            if width and width % 2 == 0
        ]
    )


def _rotations(frequencies: Sequence[torch.Tensor]) -> list[Rotation]:
    return [
        Rotation(sign * frequency, layout)
        for frequency in frequencies
        for sign in (1, -1)  # NanoChat turns backwards
        for layout in _LAYOUTS
    ]


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
