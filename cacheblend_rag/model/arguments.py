"""What a model hands to its decoder layers: which axis of each tensor runs along the rows, and what a row costs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model.cache import KVCache

__all__ = ["LayerCalls", "layer_parameters", "tensors_in", "watch_layer_calls"]

_FIRST_ROWS, _MORE_ROWS = 8, 5


def layer_parameters(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of a decoder layer's positional parameters."""
    parameters = inspect.signature(type(layer).forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[1:]


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an argument of a layer, each with its path, such as ``position_embeddings.0``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_in(f"{name}.{index}", item)


class LayerCalls:
    """What was seen of a model's decoder layers.

    Attributes
    ----------
    row_axes : dict of str to (int or None)
        For each tensor that layers are called with, by its path, the axis along which it has an entry for each computed row,
        counted from the end; None where it has none, as what is made for all tokens that are seen.
    probe_share : float
        Share of a block's arithmetic that is done when it hands over its KV.
    row_flops : int
        Floating-point operations of a block on one row.
    order : list of int
        The layers, in the order in which they were called.
    updates : list of int
        The layers that handed KV to the cache, in the order in which they did.
    restores_rows : bool
        Whether the model fails if its last layer returns some of the rows only.
    """

    def __init__(self) -> None:
        self.row_axes: dict[str, int | None] = {}
        self.probe_share = 1.0
        self.row_flops = 1
        self.order: list[int] = []
        self.updates: list[int] = []
        self.restores_rows = False


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it in part
    """Counts floating-point operations."""

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


class _Cache(KVCache):
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
    """Run a few tokens, and then a few more behind them, and see how the arguments of the layers grow.

    Of the second run's arguments, an axis as long as its tokens runs along the rows; one as long as all tokens so far does not.
    What other threads run on the model meanwhile is neither seen nor changed.

    Parameters
    ----------
    decoder : nn.Module
        The part of a model that its head stands on.
    layers : sequence of nn.Module
        Its decoder layers.
    ids : callable
        Returns so many token ids, ``(1, count)``.

    Returns
    -------
    LayerCalls
        What was seen.

    Raises
    ------
    UnsupportedModelError
        If an argument has more than one axis that could be that of the rows.
    """
    flops = _Flops()
    cache = _Cache(len(layers), flops)
    shapes: list[dict[str, set[tuple[int, ...]]]] = [{}, {}]
    starts: list[int] = []
    called: list[int] = []
    seen = shapes[0]
    thread = threading.get_ident()

    def before(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() != thread:
            return
        called.append(number)
        if len(starts) < 2:
            starts.append(flops.total)
        arguments = dict(zip(layer_parameters(module), args, strict=False)) | dict(kwargs)
        for argument, value in arguments.items():
            for path, tensor in tensors_in(argument, value):
                seen.setdefault(path, set()).add(tuple(tensor.shape))

    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, number=number: before(number, module, args, kwargs), with_kwargs=True
        )
        for number, layer in enumerate(layers)
    ]
    try:
        with flops:
            decoder(input_ids=ids(_FIRST_ROWS), past_key_values=cache, use_cache=True)
        calls = LayerCalls()
        calls.order, calls.updates = list(called), [number for number, _ in cache.at_update]
        if calls.order != list(range(len(layers))) or not calls.updates:
            return calls
        seen = shapes[1]
        decoder(input_ids=ids(_MORE_ROWS), past_key_values=cache, use_cache=True)
        calls.row_axes = {path: _row_axis(path, shapes[0].get(path, set()), after) for path, after in seen.items()}
        calls.restores_rows = _fails_on_some_rows(decoder, layers, ids, calls)
    finally:
        for hook in hooks:
            hook.remove()
    if len(starts) == 2 and starts[1] > starts[0] and cache.at_update:
        whole = starts[1] - starts[0]
        calls.probe_share = (cache.at_update[0][1] - starts[0]) / whole
        calls.row_flops = max(whole // _FIRST_ROWS, 1)
    return calls


def _fails_on_some_rows(
    decoder: nn.Module, layers: Sequence[nn.Module], ids: Callable[[int], torch.Tensor], calls: LayerCalls
) -> bool:
    axis = calls.row_axes.get(layer_parameters(layers[-1])[0])
    if axis is None:
        return False

    thread = threading.get_ident()

    def drop_rows(module: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        states = output[0] if isinstance(output, tuple) else output
        some = states.narrow(axis, 1, _MORE_ROWS - 2)
        return (some, *output[1:]) if isinstance(output, tuple) else some

    hook = layers[-1].register_forward_hook(drop_rows)
    try:
        decoder(input_ids=ids(_MORE_ROWS), past_key_values=KVCache(len(layers)), use_cache=True)
    except RuntimeError:
        return True
    finally:
        hook.remove()
    return False


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
