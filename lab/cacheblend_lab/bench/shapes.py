"""Models of well-known shapes with random weights, a tokenizer for them, and texts without meaning.

How long a prefill takes depends on the shapes alone, so nothing has to be downloaded to measure it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.initialization import no_init_weights

from cacheblend_lab.bench.settings import ModelSetting
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.errors import ConfigError

__all__ = [
    "SHAPES",
    "RandomWords",
    "made_up_word",
    "make_model",
    "random_model",
    "shape_config",
    "text_of",
    "word_tokenizer",
]

_SYLLABLES = ("ba", "den", "fo", "gri", "hal", "ju", "kem", "lo", "mi", "nor", "pa", "ris", "su", "tel", "vo", "wen")


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# From each model's config.json: the class, what `_SIZES` names, the rotary embedding, and the rest.
_Config = type[LlamaConfig] | type[Qwen2Config] | type[Gemma3TextConfig] | type[Phi3Config]
_Shape = tuple[_Config, tuple[int, ...], dict[str, Any] | None, dict[str, Any]]
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_TIED, _OWN_HEAD = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_GEMMA3 = {"head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256}
_PHI3_ROPE = _rope(10000.0) | {"partial_rotary_factor": 1.0}
# fmt: off
_SHAPES: dict[str, _Shape] = {
    "tiny": (LlamaConfig, (512, 64, 128, 4, 4, 2, 4096), None, {}),
    # The shipped model's.
    "reference": (LlamaConfig, (1908, 128, 320, 16, 4, 4, 4096), None, {}),
    "smollm2-360m": (LlamaConfig, (49152, 960, 2560, 32, 15, 5, 8192), _rope(100000.0), _TIED),
    "qwen2-0.5b": (Qwen2Config, (151936, 896, 4864, 24, 14, 2, 131072), _rope(1000000.0), _TIED),
    "gemma-3-1b": (Gemma3TextConfig, (262144, 1152, 6912, 26, 4, 1, 32768), None, _GEMMA3 | _TIED),
    # The first quarter of its layers.
    "phi-3-mini-8-layers": (Phi3Config, (32064, 3072, 8192, 8, 32, 32, 4096), _PHI3_ROPE, _OWN_HEAD),
    "llama-3.2-1b": (LlamaConfig, (128256, 2048, 8192, 16, 32, 8, 131072), _llama3_rope(32.0), {"head_dim": 64} | _TIED),
    "llama-3.2-3b": (LlamaConfig, (128256, 3072, 8192, 28, 24, 8, 131072), _llama3_rope(32.0), {"head_dim": 128} | _TIED),
    "qwen2.5-7b": (Qwen2Config, (152064, 3584, 18944, 28, 28, 4, 32768), _rope(1000000.0), _OWN_HEAD),
    "llama-3.1-8b": (LlamaConfig, (128256, 4096, 14336, 32, 32, 8, 131072), _llama3_rope(8.0), _OWN_HEAD),
}
# fmt: on

SHAPES: tuple[str, ...] = tuple(_SHAPES)
"""The names of the shapes, about from the smallest on."""


def shape_config(name: str) -> PretrainedConfig:
    """Return the configuration of a shape."""
    if name not in _SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; choose one of {', '.join(SHAPES)}")
    kind, sizes, rope, others = _SHAPES[name]
    values: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True)) | others
    if rope is not None:
        values["rope_parameters"] = rope
    return kind(bos_token_id=0, eos_token_id=None, pad_token_id=None, **values)


def random_model(config: PretrainedConfig, *, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Return a model with random weights, made in place at its final dtype, in evaluation mode, with sdpa attention."""
    with torch.device(device), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    model.eval()
    return model


def make_model(setting: ModelSetting) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model that a bench measures, and a tokenizer with a word for each id of its vocabulary."""
    shape = shape_config(setting.shape)
    model = random_model(shape, device=setting.device, dtype=getattr(torch, setting.dtype), seed=setting.seed)
    return model, word_tokenizer(int(shape.get_text_config().vocab_size))


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are ``t0``, ``t1``, ... , one for each id; ``t0`` is the BOS."""
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", clean_up_tokenization_spaces=False)


class RandomWords:
    """Tokens and texts drawn one after the other from the vocabulary of a `word_tokenizer`, its BOS left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._vocabulary = len(tokenizer)
        self._generator = torch.Generator().manual_seed(seed)

    def token_ids(self, count: int) -> list[int]:
        """Return `count` random token ids."""
        return torch.randint(1, self._vocabulary, (count,), generator=self._generator).tolist()

    def text(self, count: int) -> str:
        """Return a text of `count` tokens."""
        return text_of(self.token_ids(count))

    def chunks(self, count: int, tokens: int) -> list[Chunk]:
        """Return `count` chunks of `tokens` tokens each, with ids of their own."""
        return [Chunk(self.text(tokens), f"chunk {number}") for number in range(count)]

    def choice(self, of: int, count: int) -> list[int]:
        """Return `count` different numbers below `of`, in any order."""
        return torch.randperm(of, generator=self._generator)[:count].tolist()


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text that a `word_tokenizer` reads as these token ids."""
    return " ".join(f"t{token}" for token in token_ids)


def made_up_word(chance: random.Random) -> str:
    """Return a word of one to three syllables that most languages could have."""
    return "".join(chance.choices(_SYLLABLES, k=chance.randint(1, 3)))
