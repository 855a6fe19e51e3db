"""What watches the attention of the model while a prompt is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.model import AttentionCall, KVCache, watch_attention

__all__ = ["LayerWatcher", "Watching", "watching"]

LayerWatcher: TypeAlias = Callable[[int, AttentionCall], None]
"""Called with a layer's number and what its attention was called with; the last row is the last token of the prompt."""


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
def watching(cache: KVCache, layers: Sequence[int], watcher: LayerWatcher) -> Iterator[None]:
    """Call a watcher whenever one of these layers of a cache is attended to."""

    def after_attention(call: AttentionCall) -> None:
        layer = next((layer for layer in layers if cache.kv_layers[layer].keys is call.key), None)
        if layer is not None:
            watcher(layer, call)

    with watch_attention(after_attention):
        yield
