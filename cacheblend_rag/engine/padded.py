"""Several prompts in one padded batch, from which the model's own ``generate`` continues, and what ends and steers each row."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.engine.generation import TokenWatch
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import KVCache, model_window, unwrapped

__all__ = ["PaddedBatch", "RowEnds", "RowProcessor"]


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
        Tokens after the prompts for which each layer has room at once.

    Attributes
    ----------
    width : int
        Tokens of the longest prompt.
    starts : list of int
        The column of each prompt's first token.
    """

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
        """Copy a prompt's KV into its row.

        Parameters
        ----------
        row : int
            Which prompt.
        cache : KVCache
            Its cache after the prefill.
        logits : torch.Tensor
            Logits of the token after it, ``(vocab,)``.
        """
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
        """Answer the model's first forward over a cache with the prompts' KV and logits, for the duration of a ``with`` block.

        Calls with another cache, of other threads for example, are the model's own business. The caller has the model's lock.

        Yields
        ------
        KVCache
            The cache to call ``generate`` with, empty until that forward.
        """
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


class RowEnds(TokenWatch):
    """Ends each row of a batch by its own measure, hands its tokens on, and notes after how many, and when, it ended.

    What goes wrong in one row's criteria, processors or streamer ends that row alone.

    Parameters
    ----------
    batch : PaddedBatch
        The rows.
    limits : sequence of int
        Maximum tokens of each answer.
    end_ids : collection of int
        Tokens that end an answer.
    criteria : sequence of sequence of StoppingCriteria
        Further criteria of each row, which see it as a batch of one without padding.
    shared : sequence of StoppingCriteria
        Criteria that look at the last tokens of each row only, and see all rows at once.
    stops : sequence of threading.Event
        Each ends its row at the next token.
    streamers : sequence
        What takes each row's tokens as they come, a transformers streamer, or None.

    Attributes
    ----------
    errors : dict
        What went wrong, by rows. A row that is noted here before the first token has none.
    """

    def __init__(
        self,
        batch: PaddedBatch,
        limits: Sequence[int],
        end_ids: Collection[int],
        criteria: Sequence[Sequence[StoppingCriteria]],
        shared: Sequence[StoppingCriteria],
        stops: Sequence[threading.Event],
        streamers: Sequence[Any],
    ) -> None:
        super().__init__(threading.Event())
        self._stops = stops
        self._streamers = streamers
        self.errors: dict[int, Exception] = {}
        self._batch = batch
        self._limits = limits
        self._end_ids = frozenset(map(int, end_ids))
        self._criteria = criteria
        self._shared = shared
        self._counts: list[int | None] = [None] * len(limits)

    def count(self, row: int) -> int:
        """Return the tokens of a row's answer, once the batch has ended."""
        ended = self._counts[row]
        return len(self.times) if ended is None else ended

    def has_ended(self, row: int) -> bool:
        """Whether nothing more is wanted of a row."""
        return self._counts[row] is not None or row in self.errors

    def drop(self, row: int, error: Exception | None = None) -> None:
        """End a row before its first token."""
        self._counts[row] = 0
        if error is not None:
            self.errors[row] = error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each row is done."""
        ended = self.note()
        count = input_ids.shape[1] - self._batch.width
        newest = input_ids[:, -1].tolist()
        together = [each(input_ids, scores, **kwargs).tolist() for each in self._shared]
        for row, start in enumerate(self._batch.starts):
            if self._counts[row] is not None:
                continue
            own, streamer = input_ids[row : row + 1, start:], self._streamers[row]
            try:
                if streamer is not None:
                    streamer.put(input_ids[row, -1:].cpu())
                is_done = (
                    ended
                    or self._stops[row].is_set()
                    or count >= self._limits[row]
                    or newest[row] in self._end_ids
                    or any(done[row] for done in together)
                    # A list, since each may have to see every token.
                    or any([bool(each(own, None, **kwargs)) for each in self._criteria[row]])
                )
                if is_done and streamer is not None:
                    streamer.end()
            except Exception as error:  # handed to who asked for this row
                self.errors[row], is_done = error, True
            if is_done or row in self.errors:
                self._counts[row] = count
        done = [each is not None for each in self._counts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


class RowProcessor(LogitsProcessor):
    """Applies each row's own logits processors to it, as to a batch of one without padding.

    Parameters
    ----------
    starts : sequence of int
        The column of each row's first token.
    processors : sequence of sequence of LogitsProcessor
        Those of each row.
    ends : RowEnds
        Knows which rows have ended, whose processors are no longer asked, and is told what goes wrong.
    """

    def __init__(
        self,
        starts: Sequence[int],
        processors: Sequence[Sequence[LogitsProcessor]],
        ends: RowEnds,
    ) -> None:
        self._starts = starts
        self._processors = processors
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(rows, vocab)``, as the processors change them."""
        rows = []
        for row, start in enumerate(self._starts):
            own, changed = input_ids[row : row + 1, start:], scores[row : row + 1]
            try:
                for each in () if self._ends.has_ended(row) else self._processors[row]:
                    changed = each(own, changed)
            except Exception as error:  # handed to who asked for this row
                self._ends.errors[row], changed = error, scores[row : row + 1]
            rows.append(changed)
        return torch.cat(rows)
