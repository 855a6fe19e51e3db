"""Tiny random models of the families that the tests blend, built in code."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cacheblend_lab import families
from cacheblend_lab.families.tiny import VOCABULARY
from cacheblend_lab.reference import load_tokenizer

_SLIDING_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3", "factor": 4.0}
_GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3": ("llama", {"rope_parameters": _YARN | _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"layer_types": _SLIDING_PATTERN}),
    "phi3": ("phi3", {}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.25, "num_attention_heads": 2}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", _GRANITE),
    "cohere": ("cohere", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "num_attention_heads": 2}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1, 1]}),
}

# Latent attention, KV shared between layers, sinks, and a bias by distance.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {}),
    "gemma3n": ("gemma3n_text", {"intermediate_size": [48] * 6, "laurel_rank": 8}),
    "gpt-oss": ("gpt_oss", {}),
    "bloom": ("bloom", {}),
}

_EAGER_ONLY = ("gemma2", "gpt-oss", "bloom")
ATTENTION = {family: ("eager",) if family in _EAGER_ONLY else ("sdpa", "eager") for family in FAMILIES | FURTHER}
"""The attention implementations of each family; transformers runs soft caps, sinks and ALiBi under eager only."""

CASES = [(family, attention) for family in FAMILIES for attention in ATTENTION[family]]
FURTHER_CASES = [(family, attention) for family in FURTHER for attention in ATTENTION[family]]
_SAMPLE = {(family, ways[number % len(ways)]) for number, (family, ways) in enumerate(ATTENTION.items())}


def sampled(cases: list[tuple[str, str]], as_one: bool = False) -> list[Any]:
    """Leave all but one attention implementation of each family to the full counts; `as_one` for parameters of a fixture."""
    return [c if c in _SAMPLE else pytest.param(*((c,) if as_one else c), marks=pytest.mark.full) for c in cases]


def tiny_model(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a random float32 model of a family, large enough in its weights that attention matters."""
    model_type, changes = (FAMILIES | FURTHER)[family]
    return families.tiny_model(families.tiny_config(model_type, **changes), attention=attention, seed=seed)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tiny models' vocabulary: the word "t7" is token 7, and words are split at spaces."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{number}": number for number in range(3, VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"t{number}" for number in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def tiny_reader(**changes: Any) -> LlamaForCausalLM:
    """Return a random Llama of four layers for the reference model's tokenizer; `changes` are to its configuration."""
    tokenizer = load_tokenizer()
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        # Large weights, so that what is attended to changes what is answered.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).eval()
