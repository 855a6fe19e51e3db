"""Wrappers around a model: PEFT's adapters and torch.compile."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError

__all__ = ["past_adapters", "refuse_compiled", "unwrapped"]


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT or torch.compile put around it, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]  # PEFT's, which transformers' stubs take for a tensor
    return model if inner is None or inner is model else unwrapped(inner)


def past_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT has put around it, whose forward, up to version 0.20, PEFT calls past all hooks."""
    return unwrapped(model) if hasattr(model, "get_base_model") else model


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
