"""Several prompts in one padded batch, from which the model's own ``generate`` continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model.cache import KVCache
from cacheblend_rag.model.decoder import model_window
from cacheblend_rag.model.wrapping import unwrapped

__all__ = ["PaddedBatch"]


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

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what ``generate`` is called with, ``(prompts, width)`` each: ids, attention mask and positions."""
        mask = [[0] * start + [1] * (self.width - start) for start in self.starts]
        values = {"input_ids": self._ids, "attention_mask": mask, "position_ids": self._positions}
        return {name: torch.tensor(rows, device=device) for name, rows in values.items()}

    @contextmanager
    def prefilled(self, model: PreTrainedModel) -> Iterator[KVCache]:
        """Give a cache for ``generate`` whose first forward is answered with the prompts' KV; the caller has the model's lock."""
        # What wraps a model (adapters, torch.compile) hands generate on to the model inside.
        model = unwrapped(model)
        cache = KVCache(len(self._buffers))
        known = next(row for row in self._logits if row is not None)
        # Of a row that was dropped nothing is read.
        logits = torch.stack([known if row is None else row for row in self._logits])[:, None]
        forward, own = model.forward, vars(model).get("forward")
        window = model_window(model)
        last = None if window is None else window - 1

        @wraps(forward)
        def answer(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("past_key_values") is not cache:
                return forward(*args, **kwargs)
            if cache.get_seq_length():
                positions = kwargs.get("position_ids")
                if positions is not None and last is not None:
                    # A row that has ended goes on with the others, and no table of positions reaches beyond the window.
                    kwargs["position_ids"] = positions.clamp(max=last)
                return forward(*args, **kwargs)
            for layer, buffers in zip(cache.kv_layers, self._buffers, strict=True):
                layer.hold(buffers, self.width)
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

        model.forward = answer
        try:
            yield cache
        finally:
            # Unless it was replaced once more.
            if vars(model).get("forward") is answer:
                if own is None:
                    del model.forward
                else:
                    model.forward = own
