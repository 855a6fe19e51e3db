"""Rarer features, attached to the forward over a prompt: repair, eviction, source attention, the guard's comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.watch import SourceAttention
from cacheblend_rag.fuse import BlendCache, Repair, Steering
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import make_selector
from cacheblend_rag.selection.question import look_layers
from cacheblend_rag.snapkv import Eviction
from cacheblend_rag.tuning import Tuning

__all__ = ["attach", "decodes_alone"]


def attach(
    run: PromptRun,
    decoder: Decoder,
    cache: BlendCache,
    steering: Steering | None,
    tuning: Tuning,
    headroom: int,
    room: int,
) -> Iterator[AbstractContextManager[object]]:
    """Yield what is to be entered around a prompt's forward; each notes in the run what came of it, if the forward succeeds.

    Parameters
    ----------
    run : PromptRun
        The prompt.
    decoder : Decoder
        The model.
    cache : BlendCache
        The prompt's cache, empty.
    steering : Steering or None
        The blended prefill; None where the prompt is prefilled in full.
    tuning : Tuning
        What eviction looks at.
    headroom : int
        Tokens that will be generated at most.
    room : int
        Tokens after the prompt for which each layer is given room at once.
    """
    blend = run.request.blend
    if run.first is not None:
        yield run.first
    if steering is not None and make_selector(blend.selector).repair:
        yield _repairing(run, decoder, cache, steering)
    if blend.kv_capacity is not None:
        yield _evicting(run, decoder, cache, tuning, headroom, room)
    elif blend.source_attention:
        sources = SourceAttention(decoder.model, look_layers(None, decoder.num_layers), len(run.prompt.layout))
        run.attention = sources.of
        yield sources(cache)


def decodes_alone(blend: BlendConfig) -> str | None:
    """Return why an answer under these settings is not decoded together with others, or None."""
    if make_selector(blend.selector).repair:
        return "decode-time repair watches one answer at a time"
    if blend.source_attention:
        return "source_attention watches one answer at a time"
    if blend.kv_capacity is not None:
        return f"eviction after prefill (kv_capacity={blend.kv_capacity}) keeps other tokens of each prompt"
    return None


@contextmanager
def _repairing(run: PromptRun, decoder: Decoder, cache: BlendCache, steering: Steering) -> Iterator[None]:
    repair = Repair(decoder, cache, run.layout, steering, make_selector(run.request.blend.selector))
    with repair():
        yield
    run.charge += repair.charge
    run.figures["repaired_tokens"] = repair.repaired_rows


@contextmanager
def _evicting(
    run: PromptRun, decoder: Decoder, cache: BlendCache, tuning: Tuning, headroom: int, room: int
) -> Iterator[None]:
    assert run.plan is not None and run.request.blend.kv_capacity is not None
    selection = run.plan.selection
    eviction = Eviction(
        decoder.model,
        run.request.blend.kv_capacity,
        tuning,
        cache,
        len(run.prompt.layout),
        run.prompt.context,
        headroom,
        room,
        # A selection that looks at the first layers comes back to them.
        at_end=selection is not None and bool(selection.look_layers),
    )
    with eviction():
        yield
    run.figures["kept_reason"] = eviction.kept_reason
