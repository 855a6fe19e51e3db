"""The KV of several prompts in one padded batch, which the model's own ``generate`` goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import KVCache, unwrapped
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["PaddedBatch"]


class PaddedBatch:
    """Prompts side by side, each padded on the left, so that all go on in the same column.

    Each prompt is prefilled by itself, and its KV is copied into its row. The model's ``generate`` is then called with all
    prompts and an empty cache, and its prefill is answered with what is there.

    Parameters
    ----------
    prompts : sequence of sequence of int
        The token ids of each prompt, none empty.
    positions : sequence of sequence of int
        The position of each of those tokens.
    room : int
        Tokens behind the prompts for which each layer has room at once.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], room: int) -> None:
        self._width = max(map(len, prompts))
        self._room = room
        self.starts = [self._width - len(ids) for ids in prompts]
        # Padding repeats a token that the prompt has anyway: a penalty on repeated tokens reads the ids without a mask.
        self._ids = [[ids[0]] * start + list(ids) for ids, start in zip(prompts, self.starts, strict=True)]
        self._positions = [[0] * start + list(row) for row, start in zip(positions, self.starts, strict=True)]
        self._buffers: list[LayerKV] = []
        self._logits: list[torch.Tensor | None] = [None] * len(prompts)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return self._width

    def take(self, row: int, cache: KVCache, logits: torch.Tensor) -> None:
        """Copy a prompt's KV into its row.

        Parameters
        ----------
        row : int
            Which prompt.
        cache : KVCache
            Its cache after the prefill.
        logits : torch.Tensor
            Logits of the token behind it, ``(vocab,)``.
        """
        held = cache.kv()
        if not self._buffers:
            self._buffers = [LayerKV(*(self._buffer(tensor) for tensor in layer)) for layer in held]
        start = self.starts[row]
        for buffers, layer in zip(self._buffers, held, strict=True):
            for buffer, tensor in zip(buffers, layer, strict=True):
                buffer[row, :, start : self._width] = tensor[0]
        self._logits[row] = logits

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        # Zeros, since what is masked is multiplied by nothing, and must be a number for that.
        _, heads, _, width = tensor.shape
        return tensor.new_zeros(len(self.starts), heads, self._width + self._room, width)

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what ``generate`` is called with, ``(prompts, width)`` each: ids, attention mask and positions."""
        mask = [[0] * start + [1] * (self._width - start) for start in self.starts]
        values = {"input_ids": self._ids, "attention_mask": mask, "position_ids": self._positions}
        return {name: torch.tensor(rows, device=device) for name, rows in values.items()}

    @contextmanager
    def prefilled(self, model: PreTrainedModel) -> Iterator[KVCache]:
        """Answer the model's first forward over a cache with the prompts' KV and logits, for the duration of a ``with`` block.

        Calls with another cache, of other threads for example, are the model's own business.

        Yields
        ------
        KVCache
            The cache to call ``generate`` with, empty until that forward.
        """
        logits = torch.stack([row for row in self._logits if row is not None])[:, None]
        cache = _PrefilledCache(self._buffers, self._width, logits)
        # What wraps a model (adapters, torch.compile) hands generate on to the model inside.
        with _asking_caches(unwrapped(model)):
            yield cache


class _PrefilledCache(KVCache):
    """A cache that is filled by the first forward over it without the model.

    Parameters
    ----------
    buffers : sequence of LayerKV
        What it is filled with, for each layer.
    width : int
        How many columns of them.
    logits : torch.Tensor
        What that forward answers, ``(prompts, 1, vocab)``.
    """

    def __init__(self, buffers: Sequence[LayerKV], width: int, logits: torch.Tensor) -> None:
        super().__init__(len(buffers))
        self._buffers = buffers
        self._width = width
        self._logits = logits

    def prefill(self) -> CausalLMOutputWithPast:
        """Fill the cache and return what the model's forward would have returned."""
        for layer, buffers in zip(self.kv_layers, self._buffers, strict=True):
            layer.hold(buffers, self._width)
        return CausalLMOutputWithPast(logits=self._logits, past_key_values=self)


class _Asking:
    """A model's forward, replaced by one that asks the cache first whether it knows the answer."""

    def __init__(self, model: PreTrainedModel) -> None:
        forward = model.forward

        @wraps(forward)
        def ask(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("past_key_values")
            if isinstance(cache, _PrefilledCache) and not cache.get_seq_length():
                return cache.prefill()
            return forward(*args, **kwargs)

        self._own = vars(model).get("forward")
        self._ask = model.forward = ask
        self.blocks = 0

    def undo(self, model: PreTrainedModel) -> None:
        """Put back what was there, unless it was replaced once more."""
        if vars(model).get("forward") is not self._ask:
            return
        if self._own is None:
            del model.forward
        else:
            model.forward = self._own


_asking: WeakKeyDictionary[PreTrainedModel, _Asking] = WeakKeyDictionary()
_asking_lock = ForkSafeLock()


@contextmanager
def _asking_caches(model: PreTrainedModel) -> Iterator[None]:
    """Have a model's forward ask its cache for the duration of a ``with`` block; blocks may end in any order."""
    with _asking_lock:
        asking = _asking.get(model)
        if asking is None:
            asking = _asking[model] = _Asking(model)
        asking.blocks += 1
    try:
        yield
    finally:
        with _asking_lock:
            asking.blocks -= 1
            if not asking.blocks:
                _asking.pop(model).undo(model)
