"""Speed, measured on random weights and KV at the shapes of real models."""

from __future__ import annotations

from cacheblend_rag.lab.bench.auto import AutoBench, AutoRow, AutoRun, AutoSetting
from cacheblend_rag.lab.bench.codecs import CodecRow, CodecSetting, measure_codecs
from cacheblend_rag.lab.bench.encode import EncodeBench, EncodeRow, EncodeSetting
from cacheblend_rag.lab.bench.load import LoadBench, LoadRow, LoadSetting
from cacheblend_rag.lab.bench.prefetch import PrefetchBench, PrefetchRow, PrefetchSetting
from cacheblend_rag.lab.bench.setting import ModelSetting
from cacheblend_rag.lab.bench.shapes import SHAPES, random_model, shape_config, word_tokenizer
from cacheblend_rag.lab.bench.tpot import TPOTBench, TPOTRow, TPOTSetting
from cacheblend_rag.lab.bench.ttft import TTFTBench, TTFTRow, TTFTSetting

__all__ = [
    "SHAPES",
    "AutoBench",
    "AutoRow",
    "AutoRun",
    "AutoSetting",
    "CodecRow",
    "CodecSetting",
    "EncodeBench",
    "EncodeRow",
    "EncodeSetting",
    "LoadBench",
    "LoadRow",
    "LoadSetting",
    "ModelSetting",
    "PrefetchBench",
    "PrefetchRow",
    "PrefetchSetting",
    "TPOTBench",
    "TPOTRow",
    "TPOTSetting",
    "TTFTBench",
    "TTFTRow",
    "TTFTSetting",
    "measure_codecs",
    "random_model",
    "shape_config",
    "word_tokenizer",
]
