"""Wrappers around a model, PEFT's adapters and torch.compile, and how to hook its forward all the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["past_adapters", "uncompiled", "unwrapped", "watch_forward"]

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
    """Have the forward of the model inside all wrappers hooked, and run as it is written, in a ``with`` block."""
    inner = unwrapped(model)
    with ExitStack() as stack:
        stack.enter_context(uncompiled(model))
        if before is not None:
            stack.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after is not None:
            stack.callback(inner.register_forward_hook(after, with_kwargs=True).remove)
        yield


# torch.compile has one stance for the process: the first block sets it, and the last one to end, in any thread, restores it.
_lock = threading.Lock()
_in_blocks: list[int] = []
_stance: Any = None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Have a model that is compiled, in whole or in part, run as it is written, all others too, in a ``with`` block."""
    # A compiled forward does not see hooks that come later, and every new number of rows would have it compiled anew.
    global _stance
    if not any(
        # Not by hasattr: what a module lacks is looked for long, and this is asked of every module.
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        # A forward that was compiled and put in the place of the module's own.
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    ):
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if _stance is None:
            _stance = torch.compiler.set_stance("force_eager")
        _in_blocks.append(thread)
    try:
        yield
    finally:
        with _lock:
            _in_blocks.remove(thread)
            _restore_stance()


def _restore_stance() -> None:
    global _stance
    if _stance is not None and not _in_blocks:
        _stance.__exit__(None, None, None)
        _stance = None


def _after_fork() -> None:
    """End the blocks of threads that a forked child does not have."""
    global _lock
    _lock = threading.Lock()
    _in_blocks[:] = [thread for thread in _in_blocks if thread == threading.get_ident()]
    _restore_stance()


os.register_at_fork(after_in_child=_after_fork)
