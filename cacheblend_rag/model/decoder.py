"""Inspection of a Hugging Face decoder: all that blending needs to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.errors import CacheBlendError, PromptError, UnsupportedModelError
from cacheblend_rag.kv import LayerKV, Rotation
from cacheblend_rag.model.attention import AttentionCall, watch_attention
from cacheblend_rag.model.layers import layer_parameters, watch_layer_calls
from cacheblend_rag.model.positions import find_rotations, kv_at, takes_positions

__all__ = [
    "Decoder",
    "ModelCard",
    "REACHES",
    "inspect_model",
    "layer_types",
    "model_window",
    "num_decoder_layers",
    "placing",
    "refuse_compiled",
    "refusing_failures",
    "rope_types",
    "state_layers",
    "text_decoder",
]

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_INDEXED_TYPES = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
_MASKED_ATTENTION = {"sdpa", "eager"}
# Their masks let a token see all before it; that it sees a window only is left to the cache that they make themselves.
_WINDOW_IN_CACHE = {"moshi"}
_POSITIONS = (0, 5, 37)

REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The types of layers that do not attend to all tokens, and the setting that says how far each does."""


def model_window(model: PreTrainedModel) -> int | None:
    """Return `max_position_embeddings` of a model, or None if its configuration has none, or says that there is no limit."""
    window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(window) if window and window > 0 else None


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Return how many decoder layers a model has; 0 where its configuration does not say."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 0)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model, seen as blending sees it."""

    model: PreTrainedModel
    # Its decoder layers, in order.
    layers: Sequence[nn.Module]
    num_layers: int
    # How many of them have KV of their own; the last ones may attend to that of others.
    num_kv_layers: int
    # The name of the hidden states among the arguments of a decoder layer.
    states: str
    # The axis of the computed rows of each tensor that a layer is called with; see `LayerCalls`.
    row_axes: Mapping[str, int | None]
    # How each layer that has KV rotates its keys; None where it does not.
    rotations: tuple[Rotation | None, ...]
    # Whether KV can be moved to another position. Where positions are learned it cannot: it is that of the position at
    # which it was encoded, and of no other.
    is_movable: bool
    # Whether positions are an argument of its forward, so that a prompt may have gaps; else it counts the tokens in its cache.
    takes_positions: bool
    # The position from which on the model's rotary frequencies change with the length of the prompt; None where they do
    # not.
    rope_reach: int | None
    # Share of a decoder block's arithmetic that is done when it hands over its keys and values.
    probe_share: float
    # Floating-point operations of a decoder block on one row.
    row_flops: int
    # Bytes of KV of one token over all layers.
    kv_bytes_per_token: int
    # Whether what its layers attend to can be watched (`watch_attention`).
    shows_attention: bool

    @property
    def device(self) -> torch.device:
        """Device that token ids go to."""
        return self.model.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Device of each layer that has KV."""
        return tuple(next(layer.parameters()).device for layer in self.layers[: self.num_kv_layers])

    def kv_at(self, ids: torch.Tensor, position: int) -> list[LayerKV]:
        """Return the KV of tokens that see each other and nothing else, from `position` on; see `positions.kv_at`."""
        return kv_at(text_decoder(self.model), self.num_layers, ids, position)


def placing(model: PreTrainedModel, positions: Sequence[int] | None) -> dict[str, torch.Tensor]:
    """Return what the forward takes for one sequence to stand at `positions`; `PromptError` if it takes none."""
    if positions is None:
        return {}
    if not takes_positions(text_decoder(model)):
        raise PromptError(f"the prompt has positions, but {type(model).__name__} takes none; leave positions out")
    return {"position_ids": torch.tensor([list(positions)], device=model.device)}


@contextmanager
def refusing_failures(name: str, doing: str) -> Iterator[None]:
    """Turn what a model's own code raises in a ``with`` block into an `UnsupportedModelError`, with the reason."""
    try:
        yield
    except (CacheBlendError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot be {doing}: {type(error).__name__}: {error}") from error


def inspect_model(model: PreTrainedModel) -> Decoder:
    """Find out, on a few tokens, how to blend on a model in evaluation mode; `UnsupportedModelError` with the reason if not."""
    _refuse_by_configuration(model)
    name = type(model).__name__
    with refusing_failures(name, "inspected"):
        decoder, some_ids = text_decoder(model), partial(_some_ids, model)
        for layers in _layer_lists(decoder, num_decoder_layers(model), name):
            calls = watch_layer_calls(decoder, layers, some_ids)
            if calls.order == list(range(len(layers))):
                break
        else:
            raise UnsupportedModelError(f"{name} does not run its decoder layers once each, in order: {calls.order}")
        if not calls.updates:
            raise UnsupportedModelError(f"{name} passes no KV to the cache that it is given")
        if calls.updates != list(range(len(calls.updates))):
            raise UnsupportedModelError(
                f"{name}: its layers do not pass their KV to the cache once each, in order, but {calls.updates}"
            )
        states = layer_parameters(type(layers[0]).forward)[0]
        if calls.row_axes.get(states) is None:
            raise UnsupportedModelError(f"{name}: its layers do not receive one hidden state per token")
        # A token that stands alone sees itself only: of its KV, nothing but the rotation depends on where it stands.
        alone = some_ids(4).view(-1, 1)
        shown: list[AttentionCall] = []
        with watch_attention(shown.append):
            singles = {position: kv_at(decoder, len(layers), alone, position) for position in _POSITIONS}
        rotations = find_rotations(model, singles)
        return Decoder(
            model=model,
            layers=layers,
            num_layers=len(layers),
            num_kv_layers=len(calls.updates),
            states=states,
            row_axes=calls.row_axes,
            rotations=(None,) * len(calls.updates) if rotations is None else rotations,
            is_movable=rotations is not None,
            takes_positions=takes_positions(decoder),
            rope_reach=rope_reach(model),
            probe_share=calls.probe_share,
            row_flops=calls.row_flops,
            kv_bytes_per_token=sum(LayerKV(keys[:1], values[:1]).nbytes for keys, values in singles[0]),
            shows_attention=len(shown) == len(singles) * len(layers),
        )


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that turns token ids into hidden states."""
    decoder: nn.Module = model.get_decoder()
    # Some call the last projection of their head a decoder, and hand that out.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def _layer_lists(decoder: nn.Module, count: int, name: str) -> list[Sequence[nn.Module]]:
    """Return what may be the decoder layers; the layers of a vision tower may be as many."""
    lists = [list(each) for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    if not lists or not count:
        raise UnsupportedModelError(
            f"{name} has no list of {count} decoder layers, as many as its configuration says it has"
        )
    return [layers for layers in lists if not isinstance(layers[0], nn.Linear)]


def _some_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    # Several, drawn: the embedding of any single one may be zero, as that of padding is, and tell nothing.
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    drawn = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)


def layer_types(model: PreTrainedModel, count: int) -> list[str]:
    """Return the type of each of `count` layers, as transformers' own caches derive it."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) >= count:
        return list(types[:count])
    for kind, reach in REACHES.items():
        if getattr(config, reach, None) is not None:
            return [kind] * count
    return ["full_attention"] * count


def state_layers(model: PreTrainedModel) -> list[str]:
    """Return the types of layers that keep a state instead of KV for each token."""
    types = {*(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    # A state says nothing of what layers with an index attend to.
    return [] if types & _INDEXED_TYPES else sorted(types - _ATTENTION_TYPES)


def rope_types(model: PreTrainedModel) -> set[str]:
    """Return the kinds of rotary scaling of a model."""
    return {str(each["rope_type"]) for each in _rope_parameters(model)}


def rope_reach(model: PreTrainedModel) -> int | None:
    """Return up to which position rotary frequencies ("dynamic", "longrope") ignore the prompt's length; None for any."""
    config = model.config.get_text_config(decoder=True)
    reaches = []
    for parameters in _rope_parameters(model):
        original = parameters.get("original_max_position_embeddings")
        if parameters["rope_type"] == "dynamic":
            reaches.append(original or config.max_position_embeddings)
        elif parameters["rope_type"] == "longrope":
            reaches.append(original or getattr(config, "original_max_position_embeddings", 0))
    return int(min(reaches)) if reaches else None


def _rope_parameters(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return the rotary parameters of each kind of layer."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else parameters.values()
    return [each for each in kinds if isinstance(each, dict) and "rope_type" in each]


def _refuse_by_configuration(model: PreTrainedModel) -> None:
    """Refuse what need not be run to see that it cannot be blended."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder and hasattr(model, "get_encoder") and model.get_encoder() is not model:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders are blended")
    refuse_compiled(model)
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
    if indexed := sorted({*(getattr(config, "layer_types", None) or ())} & _INDEXED_TYPES):
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(indexed)}, which choose the tokens that they attend to by an index that they "
            "keep besides their KV; that index is not blended"
        )
    if others := state_layers(model):
        raise UnsupportedModelError(
            f'{name} has layers of type {", ".join(others)}, which keep no KV for each token; the extra "hybrid" takes over a '
            "document behind a head"
        )


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


def refuse_compiled(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if a model is compiled, in whole or in part: what is compiled does not see later hooks."""
    if any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        # A forward that was compiled and put in the place of the module's own.
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} is compiled, and blending hooks its layers; make the engine with the model as it was before "
            "torch.compile"
        )


_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ModelCard:
    """Form of a model's KV, for a process that serves the same weights in another way."""

    # Digest of the model's weights and its tokenizer, which is part of every key.
    identity: str
    # Maximum tokens that it can read and write; None if its configuration does not say.
    window: int | None
    dtype: torch.dtype
    # For each layer the number of KV heads, and the size of a head of keys and of values.
    shapes: tuple[tuple[int, int, int], ...]
    # How each layer rotates its keys; None where it does not. Equal ones are the same object.
    rotations: tuple[Rotation | None, ...]
    # The position from which on its rotary frequencies change with the length of the prompt; None where they do not.
    rope_reach: int | None = None
    # Where the KV is to go; not a part of what is written.
    device: torch.device = _CPU
    # There are no cards of models whose KV cannot be moved to another position.
    is_movable: ClassVar[bool] = True

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that have KV."""
        return len(self.shapes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token over all layers."""
        return sum(count * (keys + values) for count, keys, values in self.shapes) * self.dtype.itemsize

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each layer."""
        return (self.device,) * len(self.shapes)

    @classmethod
    def of(cls, decoder: Decoder, identity: str, window: int | None) -> ModelCard:
        """Return the card of a model, whose KV must be movable; it is run on one token."""
        with torch.no_grad():
            layers = decoder.kv_at(torch.zeros((1, 1), dtype=torch.int64, device=decoder.device), 0)
        shapes = tuple((kv.keys.shape[1], kv.keys.shape[-1], kv.values.shape[-1]) for kv in layers)
        return cls(identity, window, layers[0].keys.dtype, shapes, decoder.rotations, decoder.rope_reach)
