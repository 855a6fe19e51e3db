"""What a model's own cache holds after some tokens, taken out of it as plain tensors and put into a new one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import refusing_failures, takes_positions, text_decoder, uncompiled

__all__ = ["States"]

# Tokens of a check, and where the model leaves off and goes on.
_CHECK_TOKENS, _FIRST, _BORDER = 27, 11, 18
# Of the logits' scale, in float32.
_LEAST_NOISE = 1e-3


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a cache: its layer, its attribute there, and its key if that is a dictionary; its form, the rows as -1."""

    layer: int
    attribute: str
    key: object
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class States:
    """The end states of a model: recurrent and convolutional ones, and the KV of layers that attend.

    No table of families: which tensors there are is seen in the model's own cache, and that it goes on after a restored one as
    if it had read all itself is tried when this is made.

    Parameters
    ----------
    model : PreTrainedModel
        The model.

    Attributes
    ----------
    in_one : bool
        Whether the model reads several tokens after a state at once; else it reads them one by one.

    Raises
    ------
    UnsupportedModelError
        If it does not go on after its states as if it had read all, or its cache holds anything else.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._decoder = text_decoder(model)
        # Models of recurrent layers alone call it otherwise.
        names = signature(type(self._decoder).forward).parameters
        self._argument = "cache_params" if "cache_params" in names else "past_key_values"
        # Some count from 0 whatever their cache holds.
        self._counts = takes_positions(self._decoder)
        self.in_one = True
        name = type(model).__name__
        with torch.no_grad(), uncompiled(model), refusing_failures(name, "continued after a state"):
            vocabulary = model.config.get_text_config(decoder=True).vocab_size
            ids = torch.randint(vocabulary, (_CHECK_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
            self._blank, border = (self.read(self.begin(), ids[:length], 0) for length in (_FIRST, _BORDER))
            self._parts = list(self._found(self._blank))
            if not self._parts or self._parts != list(self._found(border)):
                raise UnsupportedModelError(f"{name} keeps states whose shape depends on the number of tokens read")
            for part in self._parts:
                _put(self._blank, part, None)
            self._check(name, ids, self.take(border))

    def begin(self) -> DynamicCache:
        """Return an empty cache, as ``generate`` makes it."""
        return DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def read(self, cache: DynamicCache, ids: Sequence[int], start: int) -> DynamicCache:
        """Have the model read tokens after the `start` ones that a cache holds, which then holds them too; return the cache."""
        step = len(ids) if self.in_one or not start else 1
        for begin in range(0, len(ids), max(step, 1)):
            self._decoder(**self.arguments(cache, ids[begin : begin + step], start + begin))
        return cache

    def take(self, cache: DynamicCache) -> list[LayerKV]:
        """Return copies of all that a cache holds, flat and on the CPU; of each pair the second is empty."""
        held = [_get(cache, part).detach().flatten().to("cpu", copy=True) for part in self._parts]
        return [LayerKV(tensor, tensor.new_empty(0)) for tensor in held]

    def restore(self, layers: Sequence[LayerKV], length: int) -> DynamicCache:
        """Return a cache that holds what was taken from one after `length` tokens; `ValueError` if it is not of this model."""
        cache = copy.deepcopy(self._blank)
        for part, (tensor, _) in zip(self._parts, layers, strict=True):
            if tensor.dtype != part.dtype:
                raise ValueError(f"a state of {tensor.dtype} is not of the model")
            _put(cache, part, tensor.to(part.device, copy=True).view(part.shape))
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length
        return cache

    @property
    def count(self) -> int:
        """How many tensors a state has."""
        return len(self._parts)

    def arguments(self, cache: DynamicCache, ids: Sequence[int], start: int) -> dict[str, Any]:
        """Return what a forward takes to compute tokens after the `start` ones that a cache holds."""
        device = self.model.device
        places = {"position_ids": torch.arange(start, start + len(ids), device=device)[None]} if self._counts else {}
        return {"input_ids": torch.tensor([ids], device=device), "use_cache": True, self._argument: cache, **places}

    def _found(self, cache: DynamicCache) -> Iterator[_Part]:
        """Yield the tensors of a cache of one sequence."""
        for layer, attribute, key, tensor in _tensors(cache):
            shape = tuple(tensor.shape)
            if attribute in ("keys", "values"):
                shape = (*shape[:-2], -1, shape[-1])
            yield _Part(layer, attribute, key, shape, tensor.dtype, tensor.device)

    def _check(self, name: str, ids: list[int], state: list[LayerKV]) -> None:
        """Raise `UnsupportedModelError` if the model goes on after a state in neither way as if it had read all."""
        wanted = self._logits(self.begin(), ids, 0)
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 1e-1
        apart = {}
        for self.in_one in (False, True):
            try:
                cache = self.read(self.restore(state, _BORDER), ids[_BORDER:-1], _BORDER)
                apart[self.in_one] = _relative(self._logits(cache, ids[-1:], len(ids) - 1), wanted)
            except (RuntimeError, ValueError, IndexError, TypeError):
                apart[self.in_one] = math.inf
        # In half precision a state that is passed over may hide among the rounding, but not when it is measured.
        self.in_one = apart[True] <= max(4 * apart[False], _LEAST_NOISE)
        if not apart[self.in_one] <= tolerance:
            raise UnsupportedModelError(
                f"{name} does not go on after its states as if it had read all itself (its logits are off by "
                f"{apart[self.in_one]:.2g} of their scale, {tolerance:g} allowed)"
            )

    def _logits(self, cache: DynamicCache, ids: Sequence[int], start: int) -> torch.Tensor:
        logits: torch.Tensor = self.model(**self.arguments(cache, ids, start)).logits
        return logits[0, -1].float()


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _tensors(cache: DynamicCache) -> Iterator[tuple[int, str, object, torch.Tensor]]:
    """Yield what is computed of the tensors in a cache, and where it is; what is counted there is no floating-point number."""
    for number, layer in enumerate(cache.layers):
        for attribute, value in sorted(vars(layer).items()):
            for key, each in value.items() if isinstance(value, dict) else [(None, value)]:
                if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel():
                    yield number, attribute, key, each


def _get(cache: DynamicCache, part: _Part) -> torch.Tensor:
    value: Any = getattr(cache.layers[part.layer], part.attribute)
    tensor: torch.Tensor = value if part.key is None else value[part.key]
    return tensor


def _put(cache: DynamicCache, part: _Part, tensor: torch.Tensor | None) -> None:
    layer = cache.layers[part.layer]
    if part.key is None:
        setattr(layer, part.attribute, tensor)
    else:
        getattr(layer, part.attribute)[part.key] = tensor
