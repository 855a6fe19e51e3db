"""Calibration of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import Runnable

from cacheblend_rag.calibration import Calibration, ModelCall, calibrate_asking
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend.calls import calls_made

__all__ = ["calibrate"]


def calibrate(chain: Runnable[Any, Any], questions: Sequence[Any], **options: Any) -> Calibration:
    """Find the smallest recompute ratio that keeps what full prefill knows, on the prompts that a chain makes.

    The chain is invoked once with each question. The prompt that answered it is then answered by full prefill and at each ratio,
    under the settings that the chain's model has, as `cacheblend_rag.calibrate` says. Nothing is changed: give what was found to
    the model, ``blend_config=BlendConfig(recompute_ratio=found.recompute_ratio)``.

    Parameters
    ----------
    chain : Runnable
        A chain with a `ChatBlend` or `BlendLLM`, which nothing else should use meanwhile.
    questions : sequence
        What the chain is invoked with, ten at least.
    **options : Any
        As for `cacheblend_rag.calibrate`: ``answers``, ``selector``, ``ratios``, ``target``,
        ``max_new_tokens``, ``progress``.

    Returns
    -------
    Calibration
        What was measured (``rows``), what was chosen (``recompute_ratio``, or None), and why (``reason``).

    Raises
    ------
    ConfigError
        If it is not a chain, blends nothing.
    """
    if not isinstance(chain, Runnable):
        raise ConfigError(f"chain is a {type(chain).__name__}; give a chain, as prompt | llm")

    def ask(question: Any) -> list[ModelCall]:
        with calls_made() as calls:
            chain.invoke(question)
        return calls

    return calibrate_asking(ask, questions, **options)
