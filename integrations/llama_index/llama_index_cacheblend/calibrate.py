"""Calibration of a query engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_query_engine import BaseQueryEngine

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra

if TYPE_CHECKING:
    from cacheblend_attachments.calibration import Calibration

__all__ = ["calibrate"]


def calibrate(query_engine: BaseQueryEngine, questions: Sequence[str], **options: Any) -> Calibration:
    """Find the smallest recompute ratio that keeps full prefill's quality, on the prompts that a query engine makes.

    Each question is asked once. The prompt that answered it is then answered by full prefill and at each ratio, under the query
    engine's settings. To apply the result, give the model ``blend_config=BlendConfig(recompute_ratio=found.recompute_ratio)``.
    `ConfigError` if it is not a query engine, or blends nothing.

    Parameters
    ----------
    query_engine : BaseQueryEngine
        A query engine that blends, which nothing else should use meanwhile.
    questions : sequence of str
        Questions as users ask them, ten at least.
    **options : Any
        As for `cacheblend_attachments.calibrate`: ``answers``, ``selector``, ``ratios``, ``target`` and so on.

    Returns
    -------
    Calibration
        What was measured (``rows``), what was chosen (``recompute_ratio``, or None), and why (``reason``).
    """
    if not isinstance(query_engine, BaseQueryEngine):
        raise ConfigError(f"query_engine is a {type(query_engine).__name__}; give what index.as_query_engine() returns")

    with needs_extra("attachments", "calibrate"):
        from cacheblend_attachments.calibration import calibrate_asking
    # A stream is read, since it may ask the model only then.
    return calibrate_asking(lambda question: str(query_engine.query(question)), questions, **options)
