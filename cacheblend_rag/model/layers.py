"""Calls of a model's decoder layers: which axis of each argument runs along the rows, and what a row costs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model.cache import CACHE, KVCache

__all__ = ["LayerCalls", "before_layers", "layer_parameters", "watch_layer_calls"]

_FIRST_ROWS, _MORE_ROWS = 8, 5


@cache
def layer_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional parameters of the forward of a kind of decoder layer."""
    parameters = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[1:]


@contextmanager
def before_layers(
    layers: Sequence[nn.Module], before: Callable[[int, dict[str, Any]], dict[str, Any] | None]
) -> Iterator[None]:
    """Have `before` called with a layer's number and arguments at each call in a ``with`` block; it may replace these."""

    def hook(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = layer_parameters(type(module).forward)
        arguments = before(number, dict(zip(names, args, strict=False)) | kwargs)
        return None if arguments is None else (tuple(arguments.pop(name) for name in names[: len(args)]), arguments)

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(partial(hook, number), with_kwargs=True).remove)
        yield


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an argument of a layer, each with its path, such as ``position_embeddings.0``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{name}.{index}", item)


@dataclass
class LayerCalls:
    """Observations of a model's decoder layers."""

    # For each tensor that layers are called with, by its path, the axis along which it has an entry for each computed row,
    # counted from the end; None where it has none, as what is made for all tokens that are seen.
    row_axes: dict[str, int | None] = field(default_factory=dict)
    # Share of a block's arithmetic that is done when it hands over its KV, and its floating-point operations on one row.
    probe_share: float = 1.0
    row_flops: int = 1
    # The layers, in the order in which they were called, and in which they handed KV to the cache.
    order: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it in part
    """Counts floating-point operations."""

    # Not torch's FlopCounterMode: that watches modules, and fails where one is called with parameters (DBRX).

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _NotingCache(KVCache):
    """Notes which layer hands over its KV, and how much arithmetic was done by then."""

    def __init__(self, num_layers: int, flops: _Flops) -> None:
        super().__init__(num_layers)
        self._flops = flops
        self.at_update: list[tuple[int, int]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.at_update.append((layer_idx, self._flops.total))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def watch_layer_calls(
    decoder: nn.Module, layers: Sequence[nn.Module], ids: Callable[[int], torch.Tensor]
) -> LayerCalls:
    """See, in a run of a few tokens and one of a few more, how the arguments of layers grow; ``ids(count)`` gives these."""
    flops = _Flops()
    noting = _NotingCache(len(layers), flops)
    calls = LayerCalls()
    shapes: list[dict[str, set[tuple[int, ...]]]] = [{}, {}]
    starts: list[int] = []
    called: list[int] = []
    seen = shapes[0]
    thread = threading.get_ident()

    def note(number: int, arguments: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            called.append(number)
            starts.append(flops.total)
            for argument, value in arguments.items():
                for path, tensor in _tensors_in(argument, value):
                    seen.setdefault(path, set()).add(tuple(tensor.shape))

    with before_layers(layers, note):
        with flops:
            decoder(input_ids=ids(_FIRST_ROWS), **{CACHE: noting}, use_cache=True)
        calls.order, calls.updates = list(called), [number for number, _ in noting.at_update]
        if calls.order != list(range(len(layers))) or not calls.updates:
            return calls
        seen = shapes[1]
        decoder(input_ids=ids(_MORE_ROWS), **{CACHE: noting}, use_cache=True)
    calls.row_axes = {path: _row_axis(path, shapes[0].get(path, set()), after) for path, after in seen.items()}
    whole = starts[1] - starts[0]
    if whole > 0:
        calls.probe_share = (noting.at_update[0][1] - starts[0]) / whole
        calls.row_flops = max(whole // _FIRST_ROWS, 1)
    return calls


def _row_axis(path: str, first: set[tuple[int, ...]], then: set[tuple[int, ...]]) -> int | None:
    axes = set()
    for shape in then:
        grew_from = {before for before in first if len(before) == len(shape)}
        axes |= {
            axis - len(shape)
            for axis, size in enumerate(shape)
            if size == _MORE_ROWS and any(before[axis] == _FIRST_ROWS for before in grew_from)
        }
    if len(axes) > 1:
        raise UnsupportedModelError(
            f"the decoder layers take {path} of shape {sorted(then)}, which cannot be cut to rows"
        )
    return axes.pop() if axes else None
