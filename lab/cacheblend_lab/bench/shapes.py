"""Models of well-known shapes with random weights, and texts without meaning.

How long a prefill takes depends on the shapes alone, so nothing has to be downloaded to measure it.
"""

from __future__ import annotations

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

from cacheblend_lab.settings import engine_settings
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError

__all__ = ["SHAPES", "RandomModel", "shape_config"]

_NO_LIMIT = 2**63 - 1


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


class RandomModel:
    """A model of random weights with a tokenizer that has a word for each id, and random texts of these words.

    Parameters
    ----------
    shape, device, dtype
        Which model, where, and of which weights; "" is float32 on the CPU and bfloat16 elsewhere.
    seed
        The seed of weights and texts.
    """

    def __init__(self, shape: str, device: str, dtype: str, seed: int = 0) -> None:
        config = shape_config(shape)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ConfigError(f"dtype {dtype!r} is unknown; choose one of float32, float16, bfloat16")
        self.facts = {"shape": shape, "device": device, "dtype": dtype}
        self.label = f"{shape}, {dtype} on {device}"
        try:
            self._generator = torch.Generator(device).manual_seed(seed)
        except RuntimeError as error:
            raise ConfigError(f"device {device!r} cannot be used: {str(error).partition(chr(10))[0]}") from error
        self.model = self._model(config, getattr(torch, dtype))
        self._vocabulary = int(config.get_text_config().vocab_size)
        self.tokenizer = _word_tokenizer(self._vocabulary)

    def _model(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        # In place at its final dtype, since the largest would not fit twice.
        with torch.device(self._generator.device), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02, generator=self._generator)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        model.eval()
        return model

    def engine(self, store: Any = None, **settings: Any) -> BlendEngine:
        """Return an engine under which every prompt is blended or refused, also where the environment says otherwise:
        without limits of RAM and disk, with KV as it was computed, and with no check of the model by itself.
        """
        named: dict[str, Any] = {
            "enabled": True,
            "ram_bytes": _NO_LIMIT,
            "disk_bytes": _NO_LIMIT,
            "disk_codec": "native",
            "self_check": False,
            "strict": True,
        }
        return BlendEngine(self.model, self.tokenizer, store=store, **engine_settings(**(named | settings)))

    def ids(self, count: int) -> list[int]:
        """Return so many random token ids, the BOS left out."""
        device = self._generator.device
        return torch.randint(1, self._vocabulary, (count,), generator=self._generator, device=device).tolist()

    def text(self, count: int) -> str:
        """Return a text of so many tokens."""
        return " ".join(f"t{token}" for token in self.ids(count))

    def chunks(self, count: int, tokens: int) -> list[Chunk]:
        """Return so many chunks of so many tokens each."""
        return [Chunk(self.text(tokens), f"chunk {number}") for number in range(count)]

    def wait(self) -> None:
        """Wait until the device has done all it was asked to; the CPU always has."""
        if self._generator.device.type == "cuda":
            torch.cuda.synchronize(self._generator.device)


def _word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are ``t0``, ``t1``, ... , one for each id; ``t0`` is the BOS."""
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", clean_up_tokenization_spaces=False)
