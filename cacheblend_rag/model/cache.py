"""KV caches that keep every token of every layer and grow in place: of one prompt, and of several in a padded batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from transformers import Cache, DynamicLayer, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.kv import LayerKV

__all__ = ["CACHE", "KVCache", "KVCacheLayer", "PaddedBatch", "answering_first", "past_adapters", "unwrapped"]

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The argument in which models take their KV cache: transformers 5.24 gave it another name."""


class KVCacheLayer(DynamicLayer):
    """One layer's KV, ``(batch, num_kv_heads, seq_len, head_dim)``, in a buffer with room for more."""

    # Tokens that every head has dropped. They count in the length, by which positions and masks are made.
    evicted_tokens = 0
    _buffer: LayerKV | None = None
    # How many tokens count as held, in a buffer that is asked for when the model comes to this layer.
    _expected: tuple[int, Callable[[], LayerKV]] | None = None

    def hold(self, buffer: LayerKV, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take over `buffer`, whose first `length` tokens are filled, and return their keys and values."""
        self.dtype, self.device = buffer.keys.dtype, buffer.keys.device
        self.is_initialized = True
        self._buffer = buffer
        self.keys = buffer.keys[:, :, :length]
        self.values = buffer.values[:, :, :length]
        return self.keys, self.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return the whole layer."""
        if self._expected is not None:
            (length, load), self._expected = self._expected, None
            self.hold(load(), length)
        length = self.held_tokens
        if length == 0:
            return self.hold(LayerKV(key_states, value_states), key_states.shape[2])
        end = length + key_states.shape[2]
        buffer = self._buffer
        assert buffer is not None and self.keys is not None and self.values is not None
        # Beam reordering and batch selection replace `keys`; the buffer is then no longer what the layer holds.
        if buffer.keys.data_ptr() != self.keys.data_ptr() or buffer.keys.shape[2] < end:
            buffer = _with_room(LayerKV(self.keys, self.values), end + max(64, end // 8))
        buffer.keys[:, :, length:end] = key_states
        buffer.values[:, :, length:end] = value_states
        return self.hold(buffer, end)

    @property
    def held_tokens(self) -> int:
        """Number of tokens that each head holds."""
        if self._expected is not None:
            return self._expected[0]
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV it holds."""
        return 0 if self.keys is None or self.values is None else LayerKV(self.keys, self.values).nbytes

    def get_seq_length(self) -> int:
        """Return how many tokens the layer has seen, those that were evicted included."""
        return self.held_tokens + self.evicted_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return for how many tokens a mask is made, and how many come before: all kept ones are past, whichever they are."""
        return self.held_tokens + query_length, self.evicted_tokens

    def keep(self, rows: torch.Tensor, room: int) -> None:
        """Drop all tokens but ``rows[head]``, ascending, ``(num_kv_heads, kept)``, and leave room for `room` more."""
        assert self.keys is not None and self.values is not None
        kept = []
        for tensor in (self.keys, self.values):
            index = rows.to(tensor.device)[None, :, :, None].expand(len(tensor), -1, -1, tensor.shape[3])
            kept.append(tensor.gather(2, index))
        count = rows.shape[1]
        self.evicted_tokens += self.held_tokens - count
        self.hold(_with_room(LayerKV(*kept), count + room), count)

    def reset(self) -> None:
        """Forget everything."""
        self._buffer = self._expected = None
        self.evicted_tokens = 0
        super().reset()


class KVCache(Cache):
    """A cache of `KVCacheLayer` objects; one that is hidden says that it is empty."""

    is_hidden = False

    def __init__(self, num_layers: int) -> None:
        self.kv_layers = [KVCacheLayer() for _ in range(num_layers)]  # type: ignore[no-untyped-call]
        super().__init__(layers=[*self.kv_layers])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has seen."""
        return 0 if self.is_hidden else super().get_seq_length(layer_idx)

    @classmethod
    def after(cls, prefix: Sequence[LayerKV], batch: int, length: int) -> KVCache:
        """Return a cache of `batch` rows with room for `length` tokens, which all begin with those of the layers in `prefix`."""
        cache = cls(len(prefix))
        for layer, kept in zip(cache.kv_layers, prefix, strict=True):
            layer.hold(_with_room(kept, length, batch), kept.keys.shape[2])
        return cache

    def expect(self, length: int, layers: int, source: Callable[[int], LayerKV]) -> None:
        """Have each of the first `layers` layers count `length` tokens as held, in a buffer that `source` returns for it."""
        for number, layer in enumerate(self.kv_layers[:layers]):
            layer._expected = length, partial(source, number)

    def cut(self, length: int) -> None:
        """Forget all but the first tokens of each row; what comes next takes their room."""
        for layer in self.kv_layers:
            if layer._buffer is not None:
                layer.hold(layer._buffer, length)

    def kv(self) -> list[LayerKV]:
        """Return the KV of every layer that holds some, ``(batch, num_kv_heads, seq_len, head_dim)`` each."""
        return [
            LayerKV(layer.keys, layer.values)
            for layer in self.kv_layers
            if layer.keys is not None and layer.values is not None
        ]


def _with_room(kv: LayerKV, length: int, batch: int | None = None) -> LayerKV:
    """Return a layer's KV at the beginning of buffers of `length` tokens; with `batch`, that of one sequence in as many rows."""
    buffers = []
    for tensor in kv:
        buffer = tensor.new_empty(batch or len(tensor), tensor.shape[1], length, tensor.shape[3])
        buffer[:, :, : tensor.shape[2]] = tensor
        buffers.append(buffer)
    return LayerKV(*buffers)


class PaddedBatch:
    """Prompts side by side, each padded on the left to `width` tokens, so that all go on in the same column."""

    def __init__(self, prompts: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], room: int) -> None:
        self.width = max(map(len, prompts))
        self._room = room
        self.starts = [self.width - len(ids) for ids in prompts]
        # Padding repeats a token that the prompt has anyway: a penalty on repeated tokens reads the ids without a mask.
        self._ids = [[ids[0]] * start + list(ids) for ids, start in zip(prompts, self.starts, strict=True)]
        self._positions = [[0] * start + list(row) for row, start in zip(positions, self.starts, strict=True)]
        self._buffers: list[LayerKV] = []
        self._logits: list[torch.Tensor | None] = [None] * len(prompts)

    def take(self, row: int, cache: KVCache, logits: torch.Tensor) -> None:
        """Copy a prompt's KV from its cache into its row, and keep the logits of the token after it, ``(vocab,)``."""
        held = cache.kv()
        if not self._buffers:
            self._buffers = [LayerKV(*(self._buffer(tensor) for tensor in layer)) for layer in held]
        start = self.starts[row]
        for buffers, layer in zip(self._buffers, held, strict=True):
            for buffer, tensor in zip(buffers, layer, strict=True):
                buffer[row, :, start : self.width] = tensor[0]
        self._logits[row] = logits

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        # Zeros, since what is masked is multiplied by nothing, and must be a number for that.
        _, heads, _, width = tensor.shape
        return tensor.new_zeros(len(self.starts), heads, self.width + self._room, width)

    def filled(self, device: torch.device) -> tuple[dict[str, torch.Tensor], KVCache, torch.Tensor]:
        """Return ids, mask and positions, ``(prompts, width)``, a cache with the KV of all, and the logits after each.

        Those of a row that was not taken, ``(vocab,)``, mean nothing.
        """
        mask = [[0] * start + [1] * (self.width - start) for start in self.starts]
        values = {"input_ids": self._ids, "attention_mask": mask, "position_ids": self._positions}
        cache = KVCache(len(self._buffers))
        for layer, buffers in zip(cache.kv_layers, self._buffers, strict=True):
            layer.hold(buffers, self.width)
        known = next(row for row in self._logits if row is not None)
        logits = torch.stack([known if row is None else row for row in self._logits])
        return {name: torch.tensor(rows, device=device) for name, rows in values.items()}, cache, logits


@contextmanager
def answering_first(
    model: PreTrainedModel, cache: KVCache, logits: torch.Tensor, later: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Have the first forward over a cache that holds whole prompts be answered with `logits`, ``(prompts, vocab)``.

    Until then the cache says that it is empty, as ``generate`` finds it before a prefill. With `later` that is called instead of
    each forward after it, with the model's own and the keywords. The caller has the model's lock.
    """
    # What wraps a model (adapters) hands generate on to the model inside.
    model = unwrapped(model)
    forward, own = model.forward, vars(model).get("forward")
    with ExitStack() as stack:

        @wraps(forward)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get(CACHE) is not cache:
                return forward(*args, **kwargs)
            if not cache.is_hidden and later is not None:
                return later(forward, **kwargs)
            cache.is_hidden = False
            if later is None:
                stack.close()
            return CausalLMOutputWithPast(logits=logits[:, None], **{CACHE: cache})

        def restore() -> None:
            cache.is_hidden = False
            # Unless it was replaced once more.
            if vars(model).get("forward") is answer:
                if own is None:
                    del model.forward
                else:
                    model.forward = own

        stack.callback(restore)
        cache.is_hidden = True
        model.forward = answer
        yield


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT or torch.compile put around it, or the model itself."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]  # PEFT's, which transformers' stubs take for a tensor
    return model if inner is None or inner is model else unwrapped(inner)


def past_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what PEFT has put around it, whose forward, up to version 0.20, PEFT calls past all hooks."""
    return unwrapped(model) if hasattr(model, "get_base_model") else model
