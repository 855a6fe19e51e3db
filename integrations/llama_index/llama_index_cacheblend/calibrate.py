"""Calibration of a query engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine

from cacheblend_rag.calibration import Calibration, ModelCall, calibrate_asking
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.report import Calls

__all__ = ["calibrate"]


def calibrate(query_engine: BaseQueryEngine, questions: Sequence[str], **options: Any) -> Calibration:
    """Find the smallest recompute ratio that keeps what full prefill knows, on the prompts that a query engine makes.

    Each question is asked once through the query engine. The prompt that answered it is then answered by full prefill and at each
    ratio, under the settings that the query engine has, as `cacheblend_rag.calibrate` says. Nothing is changed: give what was
    found to the model or the synthesizer, ``blend_config=BlendConfig(recompute_ratio=found.recompute_ratio)``.

    Parameters
    ----------
    query_engine : BaseQueryEngine
        A query engine that blends, which nothing else should use meanwhile.
    questions : sequence of str
        Questions as users ask them, ten at least.
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
        If it is not a query engine, blends nothing.
    """
    if not isinstance(query_engine, BaseQueryEngine):
        raise ConfigError(
            f"query_engine is a {type(query_engine).__name__}; give what index.as_query_engine(llm=llm, "
            "response_mode='blend') returns"
        )

    def ask(question: str) -> list[ModelCall]:
        with Calls() as calls:
            # A stream is read, since it may ask the model only then.
            str(calls.complete(query_engine.query(question), is_ours=False))
        return calls.made

    return calibrate_asking(ask, questions, **options)
