"""Interface between the recompute loop and selectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout

__all__ = ["LayerProbe", "Selection", "SelectionTask", "Selector", "pick"]


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
        What the question's tokens attend to over the fresh KV of the whole prompt, if `Selection.wants_attention`: float32,
        ``(num_heads, question_len, len(rows))``.
    """

    layer: int
    rows: torch.Tensor
    fresh: LayerKV
    stored: LayerKV
    attention: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    """What is recomputed of one prompt: rows that are known at once, or that check layers choose.

    All rows are computed in the layers before the first check layer, `narrow` is asked at each, and the rows that it keeps are
    computed from there on.

    Attributes
    ----------
    rows : torch.Tensor or None
        The rows to recompute, ascending, int64; None where there are check layers.
    check_layers : tuple of int
        Layers whose fresh KV is compared, ascending.
    narrow : callable
        Returns which rows of a `LayerProbe` to go on with, ascending.
    wants_attention : bool
        Whether probes have `LayerProbe.attention`.
    stop_layer : int or None
        The layer from which on no chunk row is computed any more; None computes the rows to the end.
    """

    rows: torch.Tensor | None = None
    check_layers: tuple[int, ...] = ()
    narrow: Callable[[LayerProbe], torch.Tensor] | None = None
    wants_attention: bool = False
    stop_layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """A way to choose the rows that are recomputed; its fields are its options. One object serves all prompts.

    A setting names one by a string, ``"hkvd"`` or ``"hkvd(check_layers=[1, 8])"``.
    """

    name: ClassVar[str]

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


def pick(scores: torch.Tensor, rows: torch.Tensor, budget: int) -> torch.Tensor:
    """Return the `budget` rows of the highest scores, ascending, or all; there is a score for each of `rows`."""
    # Not topk, which takes any of equals: where nothing was measured all are.
    chosen = scores.argsort(descending=True, stable=True)[:budget]
    return rows[chosen.sort().values.to(rows.device)]
