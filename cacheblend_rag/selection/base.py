"""Interface between the recompute loop and selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout

__all__ = ["LayerProbe", "Selection", "SelectionTask", "Selector", "pick", "segment_numbers"]


@dataclass(frozen=True)
class SelectionTask:
    """One prompt for which rows are to be selected.

    Attributes
    ----------
    layout : PromptLayout
        The prompt; its `context_rows` are what may be selected.
    num_layers : int
        Decoder layers of the model.
    budget : int
        Rows to recompute, on average over the layers after the point where the selection is made; at most the number
        of candidates.
    """

    layout: PromptLayout
    num_layers: int
    budget: int


@dataclass(frozen=True, eq=False)
class LayerProbe:
    """Fresh and stored KV of the candidates at a check layer.

    Attributes
    ----------
    layer : int
        The layer.
    rows : torch.Tensor
        The candidates still in the race, ascending, int64.
    fresh, stored : LayerKV
        This layer's KV of those rows, as just computed and as stored (moved into place),
        ``(1, num_kv_heads, len(rows), head_dim)``.
    attention : torch.Tensor or None
        What the question's tokens attend to over the fresh KV of the whole prompt, for a selection that asked for it by
        `Selection.wants_attention`: float32, ``(num_heads, question_len, len(rows))``.
    """

    layer: int
    rows: torch.Tensor
    fresh: LayerKV
    stored: LayerKV
    attention: torch.Tensor | None = None


class Selection:
    """The running selection for one prompt, in one of three forms.

    Without layers of either kind, `rows` is asked once, before layer 0. With `check_layers`, all rows are computed in the
    layers before the first of them, `narrow` is asked at each, and the kept rows are computed from there on. With
    `look_layers`, only the text of the prompt is computed up to the last of them, over stored KV; `look` is shown what the
    last token attends to in each of them, and then `rows` is asked: its rows make up for the layers they have missed, and are
    computed together with the text from there on.
    """

    check_layers: tuple[int, ...] = ()
    wants_attention: bool = False
    look_layers: tuple[int, ...] = ()
    stop_layer: int | None = None
    """The layer from which on no chunk row is computed any more; None computes the rows to the end."""

    def rows(self) -> torch.Tensor:
        """Return the rows to recompute, ascending; not asked where there are check layers."""
        raise AssertionError(f"{type(self).__name__} selects at its check layers")

    def narrow(self, probe: LayerProbe) -> torch.Tensor:
        """Return which rows of a probe to go on with, ascending."""
        raise AssertionError(f"{type(self).__name__} has no check layers")

    def look(self, layer: int, attention: torch.Tensor) -> None:
        """Take note of what the prompt's last token, after which the answer is written, attends to in one of `look_layers`.

        Parameters
        ----------
        layer : int
            The layer.
        attention : torch.Tensor
            Its attention weights over the candidates, float32, ``(num_heads, num_candidates)``.
        """
        raise AssertionError(f"{type(self).__name__} has no look layers")


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """A way to choose the rows that are recomputed; its fields are its options. One object serves all prompts.

    Selectors are compared by value. A setting names one by a string, ``"hkvd"`` or ``"hkvd(check_layers=[1, 8])"``, or is one.

    """

    name: ClassVar[str]
    needs_attention: ClassVar[bool] = False
    """Whether it must see what the question attends to."""

    def __str__(self) -> str:
        """Return the string that names this selector with its options."""
        own = [
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in own)})" if own else self.name

    @abstractmethod
    def begin(self, task: SelectionTask) -> Selection:
        """Return the selection for one prompt."""

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if this selector cannot work on a model of `num_layers` layers."""
        del num_layers

    def refusal(self, option: str, problem: str) -> ConfigError:
        """Return the error of an option without meaning."""
        return ConfigError(f"selector {self.name!r}: {option}={getattr(self, option)!r} {problem}")

    def checked_layers(self, option: str, first: int) -> tuple[int, ...] | None:
        """Return the layers that an option names, ascending from `first` on, as a tuple; None where it names none."""
        layers = getattr(self, option)
        if layers is None:
            return None
        fits = isinstance(layers, Sequence) and all(type(layer) is int for layer in layers) and len(layers) > 0
        if not fits or layers[0] < first or any(a >= b for a, b in pairwise(layers)):
            raise self.refusal(option, f"must be layer indices from {first} on, ascending, each once, at least one")
        return tuple(layers)

    def check_segment(self, most: int | None) -> None:
        """Refuse a segment length that is not a number of tokens."""
        if type(most) is not int or most < 1:
            raise self.refusal("segment_tokens", "must be a number of tokens from 1 on")


def segment_numbers(layout: PromptLayout, rows: torch.Tensor, segment_tokens: int) -> torch.Tensor:
    """Return the segment of each chunk row, from 0 on; chunks are cut into as few as possible, of like length. All ascend."""
    starts: list[int] = []
    for span in layout.chunks:
        count = -(-len(span) // segment_tokens)
        starts += [span.start + number * len(span) // count for number in range(count)]
    return torch.searchsorted(torch.tensor(starts, device=rows.device), rows, right=True) - 1


def pick(
    scores: torch.Tensor, rows: torch.Tensor, budget: int, layout: PromptLayout, segment_tokens: int = 1
) -> torch.Tensor:
    """Return the `budget` rows of the highest scores, ascending, or all; there is a score for each of `rows`, which ascend,
    int64.

    A token's KV is computed from the tokens before it in its sentence as much as from other chunks. Recomputed alone among
    stale neighbours, it stays stale; recomputed with them, it does not. So whole segments are taken, by their mean score,
    and the best tokens of the one that does not fit any more. Segments of one token take each for itself.
    """
    budget = min(budget, rows.numel())
    if segment_tokens > 1 and budget:
        # Segments by their mean, earlier ones first among equals; a token's own score decides where not all of one fit.
        order = scores.double().argsort(descending=True, stable=True)
        numbers = segment_numbers(layout, rows, segment_tokens)
        total = torch.zeros(int(numbers[-1]) + 1, dtype=torch.float64, device=scores.device)
        total.index_add_(0, numbers, scores.double())
        means = (total / torch.bincount(numbers).clamp_min(1))[numbers]
        order = order[numbers[order].argsort(stable=True)]
        chosen = order[means[order].argsort(descending=True, stable=True)][:budget]
    else:
        # Not topk, which takes any of equals: where nothing was measured all are.
        chosen = scores.argsort(descending=True, stable=True)[:budget]
    return rows[chosen.sort().values.to(rows.device)]
