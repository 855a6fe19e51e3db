"""Effect of a token's position on KV and scores, and how to run tokens at a position of choice.

Model families differ in the pairing of dimensions, in how much of a head is rotated, in scaling, and in which layers rotate at
all, and the code that says so is spread over their files. The keys themselves tell: a token that stands alone attends to itself
only, so between two positions nothing but the rotation changes.

Models with ALiBi add to their scores what depends on the distance of two tokens: their KV is the same everywhere, but they count
the tokens in their cache and take no positions, so their prompts have no gaps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.kv import LayerKV, Rotation, shift_layer
from cacheblend_rag.model.cache import CACHE, KVCache

__all__ = ["find_rotations", "kv_at", "takes_positions"]

_LAYOUTS: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
_DEFAULT_BASE = 10000.0


def takes_positions(decoder: nn.Module) -> bool:
    """Return whether positions are an argument of a decoder's forward; else it counts the tokens in its cache."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


@torch.no_grad()
def kv_at(decoder: nn.Module, num_layers: int, ids: torch.Tensor, position: int) -> list[LayerKV]:
    """Return the KV of tokens, ``(batch, seq_len)``, that see each other alone, the first at `position`, in layers with any."""
    cache = KVCache(num_layers)
    if takes_positions(decoder):
        positions = position + torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        decoder(input_ids=ids, position_ids=positions, **{CACHE: cache}, use_cache=True)
        return cache.kv()
    # Such a model counts; what stands before the tokens is masked as padding is.
    before = ids[:, :1].expand(-1, position)
    mask = torch.ones(len(ids), position + ids.shape[1], dtype=torch.int64, device=ids.device)
    mask[:, :position] = 0
    decoder(input_ids=torch.cat((before, ids), dim=1), attention_mask=mask, **{CACHE: cache}, use_cache=True)
    return [LayerKV(*(part[:, :, position:] for part in kv)) for kv in cache.kv()]


def find_rotations(
    model: PreTrainedModel, singles: Mapping[int, Sequence[LayerKV]]
) -> tuple[Rotation | None, ...] | None:
    """Return how each layer rotates its keys, None where its KV is the same everywhere; None in all if some does otherwise."""
    own, usual = _own(model), _usual(model, singles[0])
    positions = [position for position in singles if position]
    found: list[Rotation | None] = []
    for layer, origin in enumerate(singles[0]):
        tolerance = 1e-3 if origin.keys.dtype == torch.float32 else 5e-2
        moving = []
        for part in range(len(origin)):
            there = {at: singles[at][layer][part] for at in positions}
            # A head may have a few channels that are a hundred times as large as all others, and hardly turn.
            scales = torch.stack([origin[part], *there.values()]).float().abs().amax(dim=(0, 1, 3), keepdim=True)[0]
            if any(_distance(origin[part], moved, scales) > tolerance for moved in there.values()):
                moving.append((part, there, scales))
        if not moving:
            found.append(None)
            continue
        part, there, scales = moving[0]
        # Rounding may bring the usual ones nearer than those that the model holds; far away they would not be.
        best = _best(own, origin[part], there, scales, tolerance) or _best(
            usual, origin[part], there, scales, tolerance
        )
        if len(moving) > 1 or best is None:
            return None
        if part:
            alike = (each for each in found if each and each.inv_freq is best.inv_freq and each.layout == best.layout)
            best = next(alike, None) or Rotation(best.inv_freq, best.layout, "values")
        found.append(best)
    return tuple(found)


def _best(
    candidates: Sequence[Rotation],
    origin: torch.Tensor,
    there: Mapping[int, torch.Tensor],
    scales: torch.Tensor,
    tolerance: float,
) -> Rotation | None:
    """Return the rotation that takes `origin` nearest to what it is at other positions, if that is near enough."""
    error, best = math.inf, None
    for each in candidates:
        distance = max(_distance(_shifted(origin, each, at), moved, scales) for at, moved in there.items())
        if distance < error:
            error, best = distance, each
    return best if error <= tolerance else None


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
    shift_layer(LayerKV(moved, moved), rotation.table(torch.tensor([distance]), keys.device))
    return moved


def _distance(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> float:
    """Return the largest difference, over the scale of its channel."""
    return float(((a.float() - b.float()) / scales.clamp_min(torch.finfo(torch.float32).tiny)).abs().amax())
