"""Random models of any family of transformers, small enough to be run in a moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cacheblend_rag.model import CACHE, KVCache, inspect_model

__all__ = ["VOCABULARY", "tiny_config", "tiny_model", "with_outliers"]

VOCABULARY = 97
"""Tokens of a tiny model; 0 to 2 are padding, BOS and EOS."""

# By the names that configurations share; an attribute that goes by another name in a family is found through its map.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
    "max_target_positions": 512,
    "num_hidden_layers": 6,
    "num_layers": 6,
    "decoder_layers": 6,
    "encoder_layers": 2,
    "depth": 2,
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "embedding_dim": 32,
    "embed_dim": 32,
    "hidden_size_per_layer_input": 8,
    "num_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "dim_head": 8,
    "swa_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "query_pre_attn_scalar": 8,
    "rotary_dim": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "sliding_window": 16,
    "window_size": 16,
    "attention_window_size": 16,
    "attention_chunk_size": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dim_ff": 48,
    "dff": 48,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "image_size": 16,
    "patch_size": 4,
}

_SLIDING_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_MLA = {"num_key_value_heads": 4}
# The pairs of dimensions that turn by each axis of an image; of text, all axes are the same.
_MULTI_AXIS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

# What a family wants besides, or otherwise; an entry of a nested configuration stands under its name.
_OTHERWISE: dict[str, dict[str, Any]] = {
    "axk1": _MLA,
    "axk2": _MLA,
    "bailing_hybrid": _MLA,
    "bamba": {"attn_layer_indices": [1, 4]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": None,
        }
    },
    "deepseek_v2": _MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _MLA,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_expand": 2},
    "gemma3n_text": {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma4_text": {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "glm4_moe_lite": _MLA,
    "glm4v_text": _MULTI_AXIS,
    "glm_moe_dsa": _MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "kimi_linear": _MLA,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "longcat_flash": _MLA,
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minicpm3": _MLA,
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2_5_vl_text": _MULTI_AXIS,
    "qwen2_vl_text": _MULTI_AXIS,
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "youtu": _MLA,
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a configuration of a family with everything that has a size made small.

    Parameters
    ----------
    model_type : str
        The family, as transformers names it.
    **changes : Any
        Attributes of the language model to set otherwise.

    Returns
    -------
    PreTrainedConfig
        A configuration of six layers, 32 dimensions and `VOCABULARY` tokens, whose layers are of the family's own kinds.
    """
    kind = CONFIG_MAPPING[model_type]
    config: PreTrainedConfig = kind(**_shrunk(kind(), changes))
    return config


def _shrunk(config: PreTrainedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make a small configuration like `config`."""
    names = {own: common for common, own in type(config).attribute_map.items()}
    small: dict[str, Any] = {}
    text = config.get_text_config(decoder=True)
    # Attributes that differ from layer to layer cannot be read from the configuration itself, but from its dictionary.
    nested = {own: value for own, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    for own, value in config.to_dict().items():
        common = names.get(own, own)
        if own in nested:
            small[own] = _shrunk(nested[own], changes if nested[own] is text else {})
        elif common in _SIZES and ((type(value) is int and value) or common.endswith("_token_id")):
            small[own] = _SIZES[common]
    if "is_decoder" in config.to_dict():
        small["is_decoder"] = True
    small |= _OTHERWISE.get(config.model_type, {})
    return small | changes if text is config else small


def tiny_model(
    config: PreTrainedConfig,
    *,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Return a random model in evaluation mode, large enough in its weights that attention matters.

    Parameters
    ----------
    config : PreTrainedConfig
        The configuration, from `tiny_config` for example.
    attention : str, optional
        The attention implementation; by default the one that transformers chooses.
    dtype : torch.dtype
        The type of its weights.
    seed : int
        Of its weights.
    kind : Any
        The class of transformers that makes a model of a configuration.

    Returns
    -------
    PreTrainedModel
        The model, on the CPU.
    """
    torch.manual_seed(seed)
    model = kind.from_config(config, attn_implementation=attention, dtype=dtype)
    # The usual initialisation is so small that every layer is close to the identity, and mistakes in attention would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.25)
    ready: PreTrainedModel = model.eval()
    return ready


def with_outliers(model: PreTrainedModel, size: float = 150.0) -> PreTrainedModel:
    """Give each layer's keys a few channels that are a hundred times as large as the others, as those of Qwen2.5 are.

    Parameters
    ----------
    model : PreTrainedModel
        A model that can be blended; it is changed in place, before it is converted to another type.
    size : float
        The largest of the three biases that each layer gets, in whatever module makes its keys.

    Returns
    -------
    PreTrainedModel
        The model.
    """
    decoder, draw = inspect_model(model), torch.Generator().manual_seed(0)
    layers = decoder.layers[: decoder.num_kv_layers]
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, nn.Linear) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    cache = KVCache(decoder.num_layers)
    with torch.enable_grad():
        model(input_ids=torch.arange(3, 9)[None], **{CACHE: cache}, use_cache=True)
    for layer, kv, rotation in zip(layers, cache.kv(), decoder.rotations, strict=True):
        turned = kv.values if rotation is not None and rotation.part == "values" else kv.keys
        given = [getattr(each, "bias", None) for each in layer.modules() if not isinstance(each, nn.LayerNorm)]
        biases = [bias for bias in given if isinstance(bias, nn.Parameter)]
        slopes = torch.autograd.grad(turned.square().sum(), biases, allow_unused=True, retain_graph=True)
        *_, (bias, slope) = ((bias, slope) for bias, slope in zip(biases, slopes, strict=True) if slope is not None)
        channels = slope.nonzero().flatten()
        drawn = channels[torch.randperm(len(channels), generator=draw)[:3]]
        with torch.no_grad():
            bias[drawn] += size * torch.tensor([1.0, -0.4, 0.15])[: len(drawn)]
    return model
