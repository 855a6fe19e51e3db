"""Inspection of a Hugging Face model, and hooks into it."""

from cacheblend_rag.model.attention import (
    AttentionCall,
    AttentionFunction,
    attention_weights,
    replace_attention,
    watch_attention,
)
from cacheblend_rag.model.cache import CACHE, KVCache, PaddedBatch, answering_first, past_adapters, unwrapped
from cacheblend_rag.model.decoder import (
    REACHES,
    Decoder,
    ModelCard,
    inspect_model,
    layer_types,
    model_window,
    num_decoder_layers,
    placing,
    refuse_compiled,
    refusing_failures,
    state_layers,
    text_decoder,
)
from cacheblend_rag.model.fingerprint import WeightsWatch, model_fingerprint
from cacheblend_rag.model.layers import before_layers
from cacheblend_rag.model.positions import takes_positions

__all__ = [
    "CACHE",
    "REACHES",
    "AttentionCall",
    "AttentionFunction",
    "Decoder",
    "KVCache",
    "ModelCard",
    "PaddedBatch",
    "WeightsWatch",
    "answering_first",
    "attention_weights",
    "before_layers",
    "inspect_model",
    "layer_types",
    "model_fingerprint",
    "model_window",
    "num_decoder_layers",
    "past_adapters",
    "placing",
    "refuse_compiled",
    "refusing_failures",
    "replace_attention",
    "state_layers",
    "takes_positions",
    "text_decoder",
    "unwrapped",
    "watch_attention",
]
