"""What a model's configuration says about blending."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError

__all__ = [
    "layer_types",
    "model_window",
    "num_decoder_layers",
    "refuse_by_configuration",
    "rope_reach",
    "rope_types",
]

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_INDEXED_TYPES = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
_MASKED_ATTENTION = {"sdpa", "eager"}
# Their masks let a token see all before it; that it sees a window only is left to the cache that they make themselves.
_WINDOW_IN_CACHE = {"moshi"}


def model_window(model: PreTrainedModel) -> int | None:
    """Return `max_position_embeddings` of a model, or None if its configuration has none, or says that there is no limit."""
    window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(window) if window and window > 0 else None


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Return how many decoder layers a model has; 0 where its configuration does not say."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 0)


def refuse_by_configuration(model: PreTrainedModel) -> None:
    """Refuse what need not be run to see that it cannot be blended.

    Raises
    ------
    UnsupportedModelError
        With the reason.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder and hasattr(model, "get_encoder") and model.get_encoder() is not model:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are blended")
    _refuse_adapters(model, name)
    implementation = config._attn_implementation
    if implementation not in _MASKED_ATTENTION:
        raise UnsupportedModelError(
            f"{name} runs {implementation!r} attention, which takes no mask for rows with gaps; load it with "
            "attn_implementation='sdpa'"
        )
    if config.model_type in _WINDOW_IN_CACHE:
        raise UnsupportedModelError(
            f"{name} leaves its sliding window to its own cache, and blending keeps the cache whole"
        )
    types = set(getattr(config, "layer_types", None) or ())
    if types & _INDEXED_TYPES:
        raise UnsupportedModelError(
            f"{name} has layers of type {_listed(types & _INDEXED_TYPES)}, which choose the tokens that they attend to by an "
            "index that they keep besides their KV; that index is not blended"
        )
    if types - _ATTENTION_TYPES:
        raise UnsupportedModelError(
            f"{name} has layers of type {_listed(types - _ATTENTION_TYPES)}, which keep no KV for each token"
        )


def layer_types(model: PreTrainedModel, count: int) -> list[str]:
    """Return the type of each of `count` layers, as transformers' own caches derive it."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) == count:
        return list(types)
    for kind, reach in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        if getattr(config, reach, None) is not None:
            return [kind] * count
    return ["full_attention"] * count


def rope_types(model: PreTrainedModel) -> set[str]:
    """Return the kinds of rotary scaling of a model."""
    config = model.config.get_text_config(decoder=True)
    return {str(each["rope_type"]) for each in _rope_parameters(getattr(config, "rope_parameters", None))}


def _refuse_adapters(model: PreTrainedModel, name: str) -> None:
    """Refuse adapters of PEFT that do more than change what each layer computes of each token."""
    adapters = getattr(model, "peft_config", None)
    # PEFT's models have a list of the names; models of transformers that adapters were added to, a method.
    active = getattr(model, "active_adapters", None)
    for adapter, config in adapters.items() if isinstance(adapters, Mapping) else ():
        if isinstance(active, list) and adapter not in active:
            continue
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{name} has the adapter {adapter!r}, a {type(config).__name__}, which puts learned tokens before every prompt "
                "that chunks have not seen when they are encoded; a LoRA adapter can be blended"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"{name} has the adapter {adapter!r}, an activated LoRA, which begins to act where a prompt invokes it, so that "
                "a chunk's KV is not the same in every prompt; an ordinary LoRA adapter can be blended"
            )


def rope_reach(model: PreTrainedModel) -> int | None:
    """Return the position from which on rotary frequencies depend on the length of the prompt; None where they never do.

    Scaling of the kinds "dynamic" and "longrope" leaves the frequencies alone up to the length of the first training.
    """
    config = model.config.get_text_config(decoder=True)
    reaches = []
    for parameters in _rope_parameters(getattr(config, "rope_parameters", None)):
        original = parameters.get("original_max_position_embeddings")
        if parameters["rope_type"] == "dynamic":
            reaches.append(original or config.max_position_embeddings)
        elif parameters["rope_type"] == "longrope":
            reaches.append(original or getattr(config, "original_max_position_embeddings", 0))
    return int(min(reaches)) if reaches else None


def _rope_parameters(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each kind of layer."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        else:
            for each in parameters.values():
                yield from _rope_parameters(each)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
