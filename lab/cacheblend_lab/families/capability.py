"""Description of a model, layer by layer: its attention, its positions, and what blending does there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model import (
    REACHES,
    AttentionCall,
    Decoder,
    inspect_model,
    layer_types,
    num_decoder_layers,
    watch_attention,
)
from cacheblend_rag.model.decoder import rope_types

__all__ = ["Capability", "LayerCapability", "capability"]


@dataclass(frozen=True, slots=True)
class LayerCapability:
    """Description of one decoder layer, numbered from 0."""

    number: int
    # What it attends with, and to what.
    attention: str
    # What its KV owes to the position.
    positions: str
    # What blending does there, or why it does nothing.
    blending: str


@dataclass(frozen=True, slots=True)
class Capability:
    """Description of what blending can do on a model of this class."""

    model: str
    # In which it computes: "bfloat16", for example.
    dtype: str
    # Why it is refused; None where it is not.
    reason: str | None
    layers: tuple[LayerCapability, ...]

    @property
    def positions(self) -> str:
        """The kinds of positions of all layers."""
        return "; ".join(dict.fromkeys(layer.positions for layer in self.layers))

    @property
    def attention(self) -> str:
        """The kinds of attention of all layers."""
        return "; ".join(dict.fromkeys(layer.attention for layer in self.layers))


def capability(model: PreTrainedModel, decoder: Decoder | None = None, reason: str | None = None) -> Capability:
    """Describe a model's layers, inspecting it on a few tokens where neither its decoder nor why it is refused is known."""
    if decoder is None and reason is None:
        try:
            decoder = inspect_model(model)
        except UnsupportedModelError as error:
            reason = str(error)
    dtype = str(model.dtype).removeprefix("torch.")
    if decoder is None or reason is not None:
        layers = [
            LayerCapability(number, kind.replace("_", " "), "unknown", "none: prompts are prefilled in full")
            for number, kind in enumerate(layer_types(model, num_decoder_layers(model)))
        ]
        return Capability(type(model).__name__, dtype, reason, tuple(layers))
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch_attention(calls.append):
        decoder.kv_at(torch.zeros(1, 1, dtype=torch.int64, device=decoder.device), 0)
    shown = calls if len(calls) == decoder.num_layers else [None] * decoder.num_layers
    layers = [
        LayerCapability(number, _attention(model, kind, shown[number]), *_kv(decoder, number))
        for number, kind in enumerate(layer_types(model, decoder.num_layers))
    ]
    return Capability(type(model).__name__, dtype, None, tuple(layers))


def _attention(model: PreTrainedModel, kind: str, call: AttentionCall | None) -> str:
    config = model.config.get_text_config(decoder=True)
    words = [kind.removesuffix("_attention").replace("_", " ")]
    reach = getattr(config, REACHES[kind], None) if kind in REACHES else None
    if reach:
        words.append(f"of {reach}")
    if getattr(config, "kv_lora_rank", None):
        words.append("over latents")
    elif call is not None and call.key.shape[1] < call.query.shape[1]:
        words.append(f"with {call.query.shape[1]} heads on {call.key.shape[1]}")
    extras = {"softcap": "soft cap", "sinks": "sinks", "position_bias": "bias by distance"}
    return ", ".join(
        [" ".join(words), *(said for name, said in extras.items() if getattr(call, name, None) is not None)]
    )


def _kv(decoder: Decoder, number: int) -> tuple[str, str]:
    """Return what a layer's KV owes to the position, and what blending does there."""
    if number >= decoder.num_kv_layers:
        return "no KV of its own", "attends to the blended KV of an earlier layer"
    if not decoder.is_movable:
        return "fixed", "reused at the position of encoding only; chunks are encoded alone, without their documents"
    reach = "" if decoder.rope_reach is None else f", in prompts that end before {decoder.rope_reach}"
    rotation = decoder.rotations[number]
    if rotation is None:
        return "none in its KV", f"reused anywhere as it is{reach}"
    scaling = sorted(rope_types(decoder.model) - {"default"})
    words = f"rotary, {rotation.layout}, {rotation.rotary_dim} dimensions"
    words += f", {'/'.join(scaling)} scaling" if scaling else ""
    return words, f"reused anywhere, {rotation.part} turned{reach}"
