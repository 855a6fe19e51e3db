"""The card of a model that vLLM serves from a folder: what its KV is like, and whose it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from cacheblend_rag.config import EngineConfig, Tuning
from cacheblend_rag.engine.huggingface import engine_identity, look_at_model
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.files import replace_text
from cacheblend_rag.model import ModelCard, model_window
from cacheblend_rag.model.checkpoint import default_dtype
from vllm_cacheblend.asking import FULL, Precision, read_card, write_card

__all__ = ["card_of", "precision_of"]

_READ_BYTES = 1 << 24
_WEIGHTS = (".safetensors", ".bin", ".gguf")
# What the shapes of a model's KV and its rotation do not depend on, once a head has a size of its own.
_SIDES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts"),
    *("num_local_experts", "n_routed_experts", "vocab_size", "vocab_size_per_layer_input"),
)
_SIDE_SIZE = 64


def precision_of(folder: Path, quantization: str | None = None, kv_cache_dtype: str = "auto") -> Precision:
    """Return how vLLM runs a model: as its options of these names say, or the model's folder."""
    said = getattr(AutoConfig.from_pretrained(str(folder)), "quantization_config", None)
    return Precision(quantization or (said and str(said["quant_method"])), kv_cache_dtype)


def card_of(folder: Path, config: EngineConfig, store: Path, precision: Precision = FULL) -> ModelCard:
    """Return the card of a model, whose weights are read once for it; the store's folder keeps what was found."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    known = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    is_full = precision == FULL
    said = [known, str(config.dtype), *([] if is_full else precision)]
    path = store / f"card-{hashlib.blake2b(json.dumps(said).encode(), digest_size=12).hexdigest()}.json"
    try:
        return read_card(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    if is_full:
        # As the engine of this machine would run it; only its weights are wanted here, so not on a device.
        dtype = config.torch_dtype() or default_dtype(str(folder), "cuda" if torch.cuda.is_available() else "cpu")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        identity = engine_identity(model, AutoTokenizer.from_pretrained(str(folder)))
    else:
        model = _outline(folder, config)
        identity = _file_identity(files, f"{precision}|{model.dtype}")
    decoder, _ = look_at_model(model, strict=True, self_check=Tuning().self_check)
    assert decoder is not None
    if not decoder.is_movable:
        raise UnsupportedModelError(
            "the model's KV cannot be moved to another position, so prompts cannot begin with stored chunks; use vLLM "
            "without this package"
        )
    card = ModelCard.of(decoder, identity, model_window(model))
    replace_text(path, json.dumps(write_card(card)))
    return card


def _outline(folder: Path, config: EngineConfig) -> PreTrainedModel:
    """Return a random model whose KV is like that of a folder's, the weights of which vLLM alone may be able to run."""
    whole = AutoConfig.from_pretrained(str(folder))
    text: PretrainedConfig = whole.get_text_config(decoder=True)
    dtype = config.torch_dtype() or text.dtype or torch.bfloat16
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    for name in _SIDES:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, _SIDE_SIZE)
    for name in ("quantization_config", "pad_token_id"):
        if hasattr(text, name):
            setattr(text, name, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(text, dtype=dtype).eval()
        # As they are made at first, heads of few inputs differ too little for their rotation to be seen.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.1)
    return model


def _file_identity(files: Sequence[Path], run: str) -> str:
    """Return a digest of a model's files and of how they are run, in as many digits as an engine's."""
    whole = hashlib.blake2b(run.encode(), digest_size=16)
    for path in files:
        if path.suffix in _WEIGHTS or path.name == "config.json" or path.name.startswith("tokenizer"):
            whole.update(f"|{path.name}|{path.stat().st_size}|".encode())
            with path.open("rb") as file:
                while part := file.read(_READ_BYTES):
                    whole.update(part)
    return whole.hexdigest()
