"""What a model's own cache holds after some tokens, taken out of it as plain tensors and put into a new one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import CACHE, refuse_compiled, refusing_failures, takes_positions, text_decoder

__all__ = ["States"]

# Tokens of a check, and where the model leaves off and goes on.
_CHECK_TOKENS, _FIRST, _BORDER = 27, 11, 18
# Of the logits' scale, in float32.
_LEAST_NOISE = 1e-3


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a cache: which of its slots it is in, and its form, the rows as -1."""

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class States:
    """The end states of a model: recurrent and convolutional ones, and the KV of layers that attend.

    No table of families: which tensors (`parts`) there are is seen in the model's own cache, and that it goes on after a restored
    one as if it had read all itself is tried when this is made; `UnsupportedModelError` if it does not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_compiled(model)
        self.model = model
        self._decoder = text_decoder(model)
        self._counts = takes_positions(self._decoder)
        name = type(model).__name__
        with torch.no_grad(), refusing_failures(name, "continued after a state"):
            vocabulary = model.config.get_text_config(decoder=True).vocab_size
            ids = torch.randint(vocabulary, (_CHECK_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
            if not any(isinstance(layer, CacheLayerMixin) for layer in self.begin().layers):
                raise UnsupportedModelError(f"no layer of {name} attends, so its cache does not tell how much it holds")
            self._blank, border = (self.read(self.begin(), ids[:length], 0) for length in (_FIRST, _BORDER))
            self.parts = _parts(self._blank)
            if not self.parts or self.parts != _parts(border):
                raise UnsupportedModelError(f"{name} keeps states whose shape depends on the number of tokens read")
            slots = _slots(self._blank)
            for part in self.parts:
                place, key = slots[part.slot]
                place[key] = None
            self._check(name, ids, self.take(border))

    def begin(self) -> DynamicCache:
        """Return an empty cache, as ``generate`` makes it."""
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def read(self, cache: DynamicCache, ids: Sequence[int], start: int) -> DynamicCache:
        """Have the model read tokens after the `start` ones that a cache holds, which then holds them too; return the cache."""
        if ids:
            self._decoder(**self._arguments(cache, ids, start))
        return cache

    def take(self, cache: DynamicCache) -> list[LayerKV]:
        """Return copies of all that a cache holds, flat and on the CPU; of each pair the second is empty."""
        slots = _slots(cache)
        tensors = (place[key] for place, key in (slots[part.slot] for part in self.parts))
        held = [tensor.detach().flatten().to("cpu", copy=True) for tensor in tensors]
        return [LayerKV(tensor, tensor.new_empty(0)) for tensor in held]

    def restore(self, layers: Sequence[LayerKV], length: int) -> DynamicCache:
        """Return a cache that holds what was taken from one after `length` tokens."""
        cache = copy.deepcopy(self._blank)
        slots = _slots(cache)
        for part, (tensor, _) in zip(self.parts, layers, strict=True):
            place, key = slots[part.slot]
            place[key] = tensor.to(part.device, copy=True).view(part.shape)
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length
        return cache

    def places(self, stop: int, start: int = 0) -> dict[str, torch.Tensor]:
        """Return what tells the model where tokens stand, as some count from 0 whatever their cache holds."""
        return {"position_ids": torch.arange(start, stop, device=self.model.device)[None]} if self._counts else {}

    def _arguments(self, cache: DynamicCache, ids: Sequence[int], start: int) -> dict[str, Any]:
        inputs = {"input_ids": torch.tensor([ids], device=self.model.device), **self.places(start + len(ids), start)}
        return {**inputs, CACHE: cache, "use_cache": True}

    def _check(self, name: str, ids: list[int], state: list[LayerKV]) -> None:
        """Raise `UnsupportedModelError` if the model does not go on after a state, at once, as if it had read all."""
        wanted = self._logits(self.begin(), ids, 0)

        def apart(steps: int) -> float:
            cache = self.restore(state, _BORDER)
            for place in range(_BORDER, _CHECK_TOKENS - steps, steps):
                self.read(cache, ids[place : place + steps], place)
            found = self._logits(cache, ids[-steps:], _CHECK_TOKENS - steps)
            return float((found - wanted).norm() / wanted.norm())

        # In half precision a state that is passed over may hide among the rounding, but not when it is measured.
        at_once, one_by_one = apart(_CHECK_TOKENS - _BORDER), apart(1)
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 1e-1
        if not at_once <= min(tolerance, max(4 * one_by_one, _LEAST_NOISE)):
            raise UnsupportedModelError(
                f"{name} does not go on after its states as if it had read all itself: its logits are off by {at_once:.2g} of "
                "their scale, as they are where a model reads after a state one token at a time"
            )

    def _logits(self, cache: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self._arguments(cache, ids, start)).logits
        return logits[0, -1].float()


def _slots(cache: DynamicCache) -> list[tuple[dict[Any, Any], Any]]:
    """Return all places in a cache where a tensor may be: a dictionary, and the key in it."""
    slots: list[tuple[dict[Any, Any], Any]] = []
    for own in map(vars, cache.layers):
        for name in sorted(own):
            slots += [(own[name], key) for key in own[name]] if isinstance(own[name], dict) else [(own, name)]
    return slots


def _parts(cache: DynamicCache) -> list[_Part]:
    """Return the tensors of a cache of one sequence that are computed; what is counted there is no floating-point number."""
    parts = []
    for slot, (place, key) in enumerate(_slots(cache)):
        tensor = place[key]
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
            shape = tuple(tensor.shape)
            if key in ("keys", "values"):
                shape = (*shape[:-2], -1, shape[-1])
            parts.append(_Part(slot, shape, tensor.dtype, tensor.device))
    return parts
