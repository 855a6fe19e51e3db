"""Speed, measured on random weights at the shapes of real models."""

from __future__ import annotations

from cacheblend_rag.bench.shapes import SHAPES, random_model, shape_config, word_tokenizer
from cacheblend_rag.bench.ttft import TTFTBench, TTFTRow, TTFTSetting

__all__ = [
    "SHAPES",
    "TTFTBench",
    "TTFTRow",
    "TTFTSetting",
    "random_model",
    "shape_config",
    "word_tokenizer",
]
