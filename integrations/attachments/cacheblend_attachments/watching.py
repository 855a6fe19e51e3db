"""What watches the attention of the model: attachments, and a prefill whose layers show what they attend to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt, FixedText
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, PrefillResult
from cacheblend_rag.engine.attachment import Attachment, RunningForward
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import AttentionCall, KVCache, uncompiled, watch_attention
from cacheblend_rag.selection import FixedSelection, SelectionTask, Selector

__all__ = ["LayerWatcher", "WatchedPrefill", "Watching", "watch_prefill", "watching"]

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
def watching(model: PreTrainedModel, cache: KVCache, layers: Sequence[int], watcher: LayerWatcher) -> Iterator[None]:
    """Call a watcher whenever one of these layers of a cache is attended to."""

    def after_attention(call: AttentionCall) -> None:
        layer = next((layer for layer in layers if cache.kv_layers[layer].keys is call.key), None)
        if layer is not None:
            watcher(layer, call)

    with uncompiled(model), watch_attention(after_attention):
        yield


@dataclass(frozen=True, eq=False)
class WatchedPrefill:
    """Result of `watch_prefill`.

    Attributes
    ----------
    result : PrefillResult
        What `BlendEngine.prefill` returned.
    layout : PromptLayout
        Where the chunks stand in the prompt.
    recomputed_rows : torch.Tensor
        The chunk rows that were recomputed, ascending, int64; all of them where the whole prompt was computed.
    kv : list of LayerKV
        The KV of the whole prompt that decoding would go on with, ``(1, num_kv_heads, prompt_len, head_dim)`` for each layer.
    """

    result: PrefillResult
    layout: PromptLayout
    recomputed_rows: torch.Tensor
    kv: list[LayerKV]


def watch_prefill(
    engine: BlendEngine,
    prompt: BlendPrompt,
    watcher: LayerWatcher,
    *,
    blend: BlendConfig | None = None,
    rows: torch.Tensor | None = None,
) -> WatchedPrefill:
    """Prefill a prompt and show what each layer attends to; all text is computed, fixed heads included.

    Parameters
    ----------
    engine : BlendEngine
        The engine.
    prompt : BlendPrompt
        The prompt.
    watcher : callable
        Called with each layer's number and its `AttentionCall`, in layer order. If stored KV turns out to be damaged, the
        prompt is run again, and the layers start again from the first.
    blend : BlendConfig, optional
        Blending settings for this call; those it does not set are the engine's.
    rows : torch.Tensor, optional
        The rows of chunk tokens to recompute, ascending, int64, instead of those that the selector would choose.

    Raises
    ------
    PromptError
        If the prompt cannot be served.
    ConfigError
        If the settings do not fit the model, `rows` are not rows of chunks, each once and in order, or what is attached to the
        engine drops KV.
    UnsupportedModelError
        If the model's attention cannot be watched.
    """
    blend = BlendConfig() if blend is None else blend
    segments = [each.text if isinstance(each, FixedText) else each for each in prompt.segments]
    prompt = BlendPrompt(segments=segments, positions=prompt.positions, skip_unknown=prompt.skip_unknown)
    if rows is not None:
        layout = engine.prompt_layout(prompt)
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(torch.isin(rows, layout.context_rows).all()):
            raise ConfigError(
                "rows must be rows of chunk tokens, each once and ascending; `WatchedPrefill.layout.context_rows` has all of them"
            )
        share = rows.numel() / layout.context_tokens if rows.numel() else 0.0
        blend = blend.replace(selector=_Given(given=tuple(rows.tolist())), recompute_ratio=share)
    with closing(engine.attach(_Watch(watcher))) as watch:
        result = engine.prefill(prompt, blend=blend)
    request = watch.request
    # Chunks whose documents were changed meanwhile are text now.
    layout = request.prompt.layout
    return WatchedPrefill(
        result, layout, layout.context_rows if request.recomputed is None else request.recomputed, watch.kv
    )


@dataclass(frozen=True, kw_only=True)
class _Given(Selector):
    """Chunk rows that were chosen beforehand."""

    name = "given"
    given: tuple[int, ...] = ()

    def begin(self, task: SelectionTask) -> FixedSelection:
        rows = torch.tensor(self.given, dtype=torch.int64)
        return FixedSelection(rows[torch.isin(rows, task.layout.context_rows)])


class _Watch(Watching):
    """Shows each layer of the prefills of this thread to a watcher as it attends."""

    request: Request
    kv: list[LayerKV]

    def __init__(self, watcher: LayerWatcher) -> None:
        self._watcher = watcher
        self._thread = threading.get_ident()

    @contextmanager
    def around(self, forward: RunningForward) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        model, cache = forward.decoder.model, forward.cache
        waiting = list(range(len(cache.kv_layers)))

        def watch(layer: int, call: AttentionCall) -> None:
            # Rows that make up for a layer later on come without the last token, so each layer counts once.
            waiting.remove(layer)
            self._watcher(layer, call)

        with watching(model, cache, waiting, watch):
            yield
        if waiting:
            layers = ", ".join(map(str, waiting))
            raise UnsupportedModelError(f"{type(model).__name__}: the attention of layers {layers} cannot be watched")
        self.request, self.kv = forward.request, cache.kv()
