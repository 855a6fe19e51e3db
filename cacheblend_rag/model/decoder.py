"""What blending needs to know of a Hugging Face decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.errors import CacheBlendError, PromptError, UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model.arguments import layer_parameters, watch_layer_calls
from cacheblend_rag.model.attention import AttentionCall, watch_attention
from cacheblend_rag.model.bias import biases_at, column_biases
from cacheblend_rag.model.cache import KVCache
from cacheblend_rag.model.configuration import model_window, num_decoder_layers, refuse_by_configuration, rope_reach
from cacheblend_rag.model.placing import kv_at, takes_positions
from cacheblend_rag.model.rotation import find_rotations
from cacheblend_rag.model.wrapping import uncompiled
from cacheblend_rag.rope import Rotation

__all__ = ["Decoder", "inspect_model", "refusing_failures", "text_decoder"]

_POSITIONS = (0, 5, 37)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model, seen as blending sees it.

    Attributes
    ----------
    model : PreTrainedModel
        The model itself.
    layers : sequence of nn.Module
        Its decoder layers, in order.
    num_kv_layers : int
        How many of them have KV of their own; the last ones may attend to that of others.
    layer_parameters : tuple of str
        Names of a decoder layer's positional parameters.
    row_axes : mapping of str to (int or None)
        The axis of the computed rows of each tensor that a layer is called with; see `LayerCalls`.
    restores_rows : bool
        Whether what comes after the layers wants all rows, computed or not.
    rotations : tuple of (Rotation or None)
        How each layer that has KV rotates its keys; None where it does not.
    is_movable : bool
        Whether KV can be moved to another position. Where positions are learned it cannot: it is that of the position at which
        it was encoded, and of no other.
    takes_positions : bool
        Whether positions are an argument of its forward; else it counts the tokens in its cache.
    column_biases : tuple of str
        The arguments of its layers that are added to scores and depend on the position of the column (ALiBi).
    rope_reach : int or None
        The position from which on the model's rotary frequencies change with the length of the prompt; None where they do not.
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
    num_kv_layers: int
    layer_parameters: tuple[str, ...]
    row_axes: Mapping[str, int | None]
    restores_rows: bool
    rotations: tuple[Rotation | None, ...]
    is_movable: bool
    takes_positions: bool
    column_biases: tuple[str, ...]
    rope_reach: int | None
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
        """Where each layer that has KV is computed."""
        return tuple(next(layer.parameters()).device for layer in self.layers[: self.num_kv_layers])

    @property
    def window(self) -> int | None:
        """Most tokens that the model can read and write, or None if its configuration does not say."""
        return model_window(self.model)

    @property
    def is_placeable(self) -> bool:
        """Whether a prompt may have gaps between its positions."""
        return self.takes_positions or (self.is_movable and not any(self.rotations))

    @contextmanager
    def placing(self, cache: KVCache, positions: Sequence[int] | None) -> Iterator[dict[str, torch.Tensor]]:
        """Have the model's forward take the positions of one sequence, for the duration of a ``with`` block.

        Parameters
        ----------
        cache : KVCache
            The cache it is called with.
        positions : sequence of int or None
            The position of each token; tokens that are generated follow the last one. None leaves everything to the model.

        Yields
        ------
        dict
            What its forward is to be called with as well.

        Raises
        ------
        PromptError
            If it takes no positions.
        """
        if positions is None:
            yield {}
            return
        if not self.is_placeable:
            raise PromptError(
                f"the prompt places its segments, and {type(self.model).__name__} takes no positions; leave positions out"
            )
        with (
            uncompiled(self.model) if self.column_biases else nullcontext(),
            biases_at(self.layers, self.column_biases, cache, positions),
        ):
            places = torch.tensor([list(positions)], device=self.device)
            yield {"position_ids": places} if self.takes_positions else {}

    def kv_at(self, ids: torch.Tensor, position: int) -> list[LayerKV]:
        """Return the KV of tokens that see each other and nothing else, from `position` on; see `placing.kv_at`."""
        return kv_at(text_decoder(self.model), self.num_layers, ids, position)


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
    refuse_by_configuration(model)
    name = type(model).__name__
    with uncompiled(model), refusing_failures(name, "inspected"):
        return _inspected(model, name)


@contextmanager
def refusing_failures(name: str, doing: str) -> Iterator[None]:
    """Turn what a model's own code raises in a ``with`` block into a refusal, with the reason.

    Raises
    ------
    UnsupportedModelError
        If it fails.
    """
    try:
        yield
    except (CacheBlendError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot be {doing}: {type(error).__name__}: {error}") from error


def _inspected(model: PreTrainedModel, name: str) -> Decoder:
    decoder = text_decoder(model)
    for layers in _layer_lists(decoder, num_decoder_layers(model), name):
        calls = watch_layer_calls(decoder, layers, lambda count: _some_ids(model, count).view(1, -1))
        if calls.order == list(range(len(layers))):
            break
    else:
        raise UnsupportedModelError(f"{name} does not run its decoder layers once each, in order: {calls.order}")
    if not calls.updates:
        raise UnsupportedModelError(f"{name} hands no KV to the cache that it is given")
    if calls.updates != list(range(len(calls.updates))):
        raise UnsupportedModelError(
            f"{name}: its layers do not hand their KV to the cache once each, in order, but {calls.updates}"
        )
    if calls.row_axes.get(layer_parameters(layers[0])[0]) is None:
        raise UnsupportedModelError(f"{name}: its layers are not handed one hidden state for each token")
    # A token that stands alone sees itself only: of its KV, nothing but the rotation depends on where it stands.
    alone = _some_ids(model, 4).view(-1, 1)
    shown: list[AttentionCall] = []
    with watch_attention(shown.append):
        singles = {position: kv_at(decoder, len(layers), alone, position) for position in _POSITIONS}
    rotations = find_rotations(model, singles)
    return Decoder(
        model=model,
        layers=layers,
        num_kv_layers=len(calls.updates),
        layer_parameters=layer_parameters(layers[0]),
        row_axes=calls.row_axes,
        restores_rows=calls.restores_rows,
        rotations=(None,) * len(calls.updates) if rotations is None else rotations,
        is_movable=rotations is not None,
        takes_positions=takes_positions(decoder),
        column_biases=column_biases(decoder, layers, lambda count: _some_ids(model, count).view(1, -1)),
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
    drawn = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.device)
