"""Several prompts in one padded batch, and answering the first forward of the model's own ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model.cache import KVCache

__all__ = ["PaddedBatch", "answering_first", "past_adapters", "unwrapped"]


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
def answering_first(model: PreTrainedModel, cache: KVCache, logits: torch.Tensor) -> Iterator[None]:
    """Have the first forward over a cache that holds whole prompts be answered with `logits`, ``(prompts, vocab)``.

    Until then the cache says that it is empty, as ``generate`` finds it before a prefill. The caller has the model's lock.
    """
    # What wraps a model (adapters) hands generate on to the model inside.
    model = unwrapped(model)
    forward, own = model.forward, vars(model).get("forward")
    with ExitStack() as stack:

        @wraps(forward)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("past_key_values") is not cache:
                return forward(*args, **kwargs)
            stack.close()
            return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)

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
