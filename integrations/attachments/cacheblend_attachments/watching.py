"""What watches the attention of the model while a prompt is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.backend import Attachment
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.model import unwrapped

__all__ = ["Watching", "look_layers", "watch_forward"]

# Shares of the depth, by measurement on a small model.
_LOOK_FROM, _LOOK_TO = 0.25, 0.75

BeforeForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
AfterForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


class Watching(Attachment):
    """Watches what the model attends to while one prompt is answered.

    One of a kind is attached to an engine, and nothing beside one that drops KV.
    """

    drops_kv = False

    def attached(self, engine: BlendEngine) -> None:
        """Refuse what cannot be watched: models that cannot be blended or show no attention, beside what does not go with it."""
        name, decoder = type(self).__name__, engine.decoder
        if decoder is None:
            raise UnsupportedModelError(f"{name} watches blended prompts; {engine.unsupported_reason}")
        if not decoder.shows_attention:
            raise UnsupportedModelError(
                f"{name} needs attention weights, which {type(decoder.model).__name__} does not show; leave it out"
            )
        for other in engine.attachments:
            if isinstance(other, Watching) and (type(other) is type(self) or self.drops_kv or other.drops_kv):
                raise ConfigError(
                    f"{name} cannot be combined with the {type(other).__name__} attached to this engine; close that first"
                )

    def alone_reason(self, request: Request) -> str | None:
        return f"{type(self).__name__} watches one answer at a time"


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


def look_layers(asked: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers in which attention is watched; one layer at least comes after them, or `ConfigError`."""
    if asked is not None:
        if asked[-1] >= num_layers - 1:
            raise ConfigError(f"look_layers={asked} must end before the model's last layer, {num_layers - 1}")
        return asked
    if num_layers < 2:
        raise ConfigError("watching attention needs two layers, and the model has one; leave it out")
    first = min(round(_LOOK_FROM * num_layers), num_layers - 2)
    return tuple(range(first, max(first + 1, min(round(_LOOK_TO * num_layers), num_layers - 1))))
