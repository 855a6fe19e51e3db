"""Calibration of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable

from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra
from langchain_cacheblend.calls import calls_made

if TYPE_CHECKING:
    from cacheblend_attachments.calibration import Calibration

__all__ = ["calibrate"]


def calibrate(chain: Runnable[Any, Any], questions: Sequence[Any], **options: Any) -> Calibration:
    """Find the smallest recompute ratio that keeps what full prefill knows, on the prompts that a chain makes.

    The chain is invoked once with each question. The prompt that answered it is then answered by full prefill and at each ratio,
    under the settings that the chain's model has, as `cacheblend_attachments.calibrate` says. Nothing is changed: give
    what was found to the model, ``blend_config=BlendConfig(recompute_ratio=found.recompute_ratio)``.

    Parameters
    ----------
    chain : Runnable
        A chain with a `ChatBlend` or `BlendLLM`, which nothing else should use meanwhile.
    questions : sequence
        What the chain is invoked with, ten at least.
    **options : Any
        As for `cacheblend_attachments.calibrate`: ``answers``, ``selector``, ``ratios``, ``target`` and so on.

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

    with needs_extra("attachments", "calibrate"):
        from cacheblend_attachments.calibration import calibrate_asking
    return calibrate_asking(ask, questions, **options)
