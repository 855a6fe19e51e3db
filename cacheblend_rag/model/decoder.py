"""What blending needs to know of a Hugging Face decoder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model.attention import AttentionCall, watch_attention
from cacheblend_rag.model.cache import KVCache
from cacheblend_rag.model.rotation import find_rotations
from cacheblend_rag.rope import Rotation

__all__ = ["Decoder", "inspect_model", "model_window", "num_decoder_layers"]

_BLENDABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MASKED_ATTENTION = {"sdpa", "eager"}


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model, seen as blending sees it.

    Attributes
    ----------
    model : PreTrainedModel
        The model itself.
    layers : sequence of nn.Module
        Its decoder layers, in order.
    layer_parameters : tuple of str
        Names of a decoder layer's positional parameters.
    rotations : tuple of (Rotation or None)
        How each layer rotates its keys; None where it does not.
    probe_share : float
        Share of a decoder block's arithmetic that is done when it hands over its keys and values.
    row_flops : int
        Floating-point operations of a decoder block on one row.
    kv_bytes_per_token : int
        Bytes of KV of one token over all layers.
    shows_attention : bool
        Whether what its layers attend to can be watched (`watch_attention`).
    """

    model: PreTrainedModel
    layers: Sequence[nn.Module]
    layer_parameters: tuple[str, ...]
    rotations: tuple[Rotation | None, ...]
    probe_share: float
    row_flops: int
    kv_bytes_per_token: int
    shows_attention: bool

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each layer is computed."""
        return tuple(next(layer.parameters()).device for layer in self.layers)

    @property
    def window(self) -> int | None:
        """Most tokens that the model can read and write, or None if its configuration does not say."""
        return model_window(self.model)


def model_window(model: PreTrainedModel) -> int | None:
    """Return `max_position_embeddings` of a model, or None if its configuration has none."""
    window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(window) if window else None


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Return how many decoder layers a model has."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def inspect_model(model: PreTrainedModel) -> Decoder:
    """Find out how to blend on `model`, running it on a few tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model in evaluation mode.

    Returns
    -------
    Decoder
        Everything the blended prefill needs.

    Raises
    ------
    UnsupportedModelError
        If its KV cannot be blended, with the reason.
    """
    _refuse_by_configuration(model)
    layers = _decoder_layers(model)
    calls: list[AttentionCall] = []
    with watch_attention(calls.append):
        singles = {position: _run_alone(model, layers, position) for position in (0, 5, 37)}
    shown = len(calls) == len(singles) * len(layers)
    rotations = find_rotations(model, singles)
    share, flops = _block_arithmetic(model, layers)
    bytes_per_token = sum(LayerKV(keys[:1], values[:1]).nbytes for keys, values in singles[0].kv())
    signature = inspect.signature(type(layers[0]).forward).parameters.values()
    names = tuple(p.name for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[1:]
    return Decoder(model, layers, names, rotations, share, flops, bytes_per_token, shown)


def _refuse_by_configuration(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are blended")
    implementation = config._attn_implementation
    if implementation not in _MASKED_ATTENTION:
        raise UnsupportedModelError(
            f"{name} runs {implementation!r} attention, which takes no mask for rows with gaps; load it with "
            "attn_implementation='sdpa'"
        )
    foreign = set(getattr(config, "layer_types", None) or ()) - _BLENDABLE_LAYER_TYPES
    if foreign:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(foreign))}, which keep no KV for each token"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{name} shares KV between layers (num_kv_shared_layers={config.num_kv_shared_layers})"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name} uses {rope_type!r} rope scaling, whose frequencies depend on the length of the prompt, so "
                "stored keys cannot be moved"
            )


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {str(parameters["rope_type"])}
    return set().union(*(_rope_types(value) for value in parameters.values())) if parameters else set()


def _decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    count = num_decoder_layers(model)
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} decoder layers")


def _some_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    # Several, drawn: the embedding of any single one may be zero, as that of padding is, and tell nothing.
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    drawn = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)


@torch.no_grad()
def _run_alone(model: PreTrainedModel, layers: Sequence[nn.Module], position: int) -> KVCache:
    """Run a few tokens, each alone, at `position`: with nothing to attend to, only their keys' rotation depends on it."""
    cache = KVCache(len(layers))
    ids = _some_ids(model, 4).view(-1, 1)
    model.get_decoder()(
        input_ids=ids, position_ids=torch.full_like(ids, position), past_key_values=cache, use_cache=True
    )
    return cache


class _FlopCache(KVCache):
    """Notes how much arithmetic was done when each layer hands over its KV."""

    def __init__(self, num_layers: int, counter: FlopCounterMode) -> None:
        super().__init__(num_layers)
        self._counter = counter
        self.at_update: list[int] = []

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.at_update.append(self._counter.get_total_flops())
        return super().update(*args, **kwargs)


@torch.no_grad()
def _block_arithmetic(model: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[float, int]:
    """Return the share of a block's arithmetic behind which its KV is there, and the operations that it does on one row."""
    starts: list[int] = []
    counter = FlopCounterMode(display=False)
    cache = _FlopCache(len(layers), counter)
    hooks = [
        layer.register_forward_pre_hook(lambda *_: starts.append(counter.get_total_flops())) for layer in layers[:2]
    ]
    ids = _some_ids(model, 8).view(1, -1)
    try:
        with counter:
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    if len(starts) < 2 or starts[1] <= starts[0]:
        return 1.0, 1
    whole = starts[1] - starts[0]
    return (cache.at_update[0] - starts[0]) / whole, whole // ids.shape[1]
