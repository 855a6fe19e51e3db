"""Watching and replacing a model's attention calls, whatever the model and its attention implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

__all__ = ["AttentionCall", "AttentionFunction", "attention_weights", "replace_attention", "watch_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Arguments of one call of a layer's attention."""

    # Rotated queries of the computed rows, ``(batch, num_heads, rows, head_dim)``.
    query: torch.Tensor
    # ``(batch, num_kv_heads, seq_len, head_dim)``; the object that the cache returned.
    key: torch.Tensor
    # Boolean (True where a row may attend) or additive, ``(batch, 1 or num_heads, rows, seq_len)``; None where the kernel's
    # causal flag is relied on.
    mask: torch.Tensor | None
    scaling: float
    # The bound that scores are bent to by a hyperbolic tangent.
    softcap: float | None = None
    # A score for each head that takes attention from all tokens, ``(num_heads,)``.
    sinks: torch.Tensor | None = None
    # What is added to the scores because of the distance of two tokens.
    position_bias: torch.Tensor | None = None


AttentionFunction = Callable[..., Any]


def attention_weights(call: AttentionCall, window: int) -> torch.Tensor:
    """Return what the last `window` rows of one sequence attend to, float32, ``(num_heads, window, seq_len)``."""
    key = call.key[0]
    kv_heads, columns, width = key.shape
    # Scaled first, as kernels do: in half precision the product itself may be too large.
    query = call.query[0, :, -window:] * call.scaling
    heads, window = query.shape[:2]
    scores = query.reshape(kv_heads, heads // kv_heads * window, width) @ key.transpose(1, 2)
    scores = scores.view(heads, window, columns).float()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.position_bias is not None:
        scores = scores + call.position_bias[0, :, -window:, :columns].float()
    if call.mask is None or call.mask.ndim != 4:
        later = torch.ones(window, window, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., columns - window :].masked_fill_(later, -torch.inf)
    else:
        mask = call.mask[0, :, -window:, :columns]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    total = scores.logsumexp(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = torch.logaddexp(total, call.sinks.float().view(heads, 1, 1))
    return (scores - total).exp()


class _Replacements(threading.local):
    """Replacements of attention functions in one thread, the innermost first."""

    def __init__(self) -> None:
        self.all: list[AttentionFunction] = []


_replacements = _Replacements()
_lock = threading.Lock()
_open = 0
_original = AttentionInterface.get_interface


@contextmanager
def replace_attention(replacement: AttentionFunction, *, innermost: bool = True) -> Iterator[None]:
    """Have the models of this thread attend by another function in a ``with`` block, innermost of those open, or outermost."""
    global _open
    with _lock:
        if _open == 0:
            AttentionInterface.get_interface = _get_interface  # type: ignore[assignment, method-assign]
        _open += 1
    ours = _replacements.all
    ours.insert(0 if innermost else len(ours), replacement)
    try:
        yield
    finally:
        ours.remove(replacement)
        with _lock:
            _open -= 1
            if _open == 0:
                AttentionInterface.get_interface = _original  # type: ignore[method-assign]


def watch_attention(watcher: Callable[[AttentionCall], None], *, before: bool = False) -> AbstractContextManager[None]:
    """Have `watcher` called at every attention call of this thread in a ``with`` block; `before` it, it may raise to leave."""
    return replace_attention(partial(_watched, watcher, before), innermost=False)


def _get_interface(
    table: AttentionInterface, attn_implementation: str, default: AttentionFunction
) -> AttentionFunction:
    function: AttentionFunction = _original(table, attn_implementation, default)
    for replacement in _replacements.all:
        function = partial(replacement, function)
    return function


def _watched(
    watcher: Callable[[AttentionCall], None],
    before: bool,
    function: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    scaling = kwargs.get("scaling")
    call = AttentionCall(
        query,
        key,
        attention_mask,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        kwargs.get("position_bias"),
    )
    if before:
        watcher(call)
    result = function(module, query, key, value, attention_mask, *args, **kwargs)
    if not before:
        watcher(call)
    return result
