"""The recompute ratio that hides behind loading (CacheBlend, section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.trace import LayerTimes

__all__ = ["choose_ratio"]


def choose_ratio(engine: BlendEngine, prompts: Sequence[BlendPrompt]) -> float:
    """Return the recompute ratio at which recomputing chunk tokens takes as long as loading their KV (CacheBlend, section 5).

    A smaller one saves no time where the two run beside each other. Two speeds are measured: each prompt is prefilled over the
    stored KV of its chunks, from wherever that lies now, and in full, which tells what a token costs.

    Parameters
    ----------
    engine : BlendEngine
        The engine, which nothing else should use meanwhile. Its own ratio is the least that is chosen.
    prompts : sequence of BlendPrompt
        Prompts as they will be asked, whose chunks are stored. What is read is kept in RAM from then on, so prompts with chunks
        that were asked before tell how fast RAM is.

    Returns
    -------
    float
        The ratio, for `BlendConfig(recompute_ratio=...)`. It is 1, full prefill, where loading takes longer than computing.

    Raises
    ------
    ConfigError
        If no prompt loads stored KV for all its chunks.
    UnsupportedModelError
        If the engine cannot blend or recompute.
    """
    if engine.decoder is None:
        reason = engine.unsupported_reason or f"a {type(engine).__name__} recomputes nothing"
        raise UnsupportedModelError(f"{reason}; there is no ratio to choose")
    least, whole = engine.blend.recompute_ratio, BlendConfig(enabled=False)
    blend = engine.blend.replace(enabled=True, selector="none")
    load_s = compute_s = 0.0
    for number, prompt in enumerate(prompts):
        if not number:
            # The first prompt of a process pays for what it begins.
            engine.prefill(prompt, blend=whole)
        report = engine.prefill(prompt, blend=blend).report
        if report.misses or report.trace is None or report.trace.layers is None:
            continue
        full = engine.prefill(prompt, blend=whole).report
        load_s += loading_s(report.trace.layers)
        compute_s += full.recompute_s * report.context_tokens / full.prompt_tokens
    if not compute_s:
        raise ConfigError(
            f"none of the {len(prompts)} prompts loads stored KV for all its chunks; give prompts of stored chunks"
        )
    return min(max(load_s / compute_s, least), 1.0)


def loading_s(times: LayerTimes) -> float:
    """Return the seconds in which some layer was being loaded."""
    seconds, until = 0.0, 0.0
    for began, ended in sorted((times.load_began[layer], ended) for layer, ended in times.load_ended.items()):
        seconds += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    return seconds
