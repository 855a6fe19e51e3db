"""Wrappers around a model, PEFT's adapters and torch.compile, and how to hook the forward inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["past_adapters", "refuse_compiled", "unwrapped", "watch_forward"]

BeforeForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
AfterForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT or torch.compile put around it, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]  # PEFT's, which transformers' stubs take for a tensor
    return model if inner is None or inner is model else unwrapped(inner)


def past_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT has put around it, whose forward, up to version 0.20, PEFT calls past all hooks."""
    return unwrapped(model) if hasattr(model, "get_base_model") else model


@contextmanager
def watch_forward(
    model: PreTrainedModel, *, before: BeforeForward | None = None, after: AfterForward | None = None
) -> Iterator[None]:
    """Have the forward of the model inside all wrappers hooked in a ``with`` block."""
    inner = unwrapped(model)
    with ExitStack() as stack:
        if before is not None:
            stack.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after is not None:
            stack.callback(inner.register_forward_hook(after, with_kwargs=True).remove)
        yield


def refuse_compiled(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if a model is compiled, in whole or in part: what is compiled does not see later hooks."""
    if any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        # A forward that was compiled and put in the place of the module's own.
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} is compiled, and blending hooks its layers; make the engine with the model as it was before "
            "torch.compile"
        )
