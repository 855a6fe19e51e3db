"""What the recompute loop asks of a selector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout

__all__ = ["Selection", "SelectionTask", "Selector"]


@dataclass(frozen=True)
class SelectionTask:
    """One prompt for which rows are to be selected.

    Attributes
    ----------
    layout : PromptLayout
        The prompt; its `candidate_rows` are what may be selected.
    num_layers : int
        Decoder layers of the model.
    budget : int
        Rows to recompute, on average over the layers behind the point where the selection is made; at most the number
        of candidates.
    """

    layout: PromptLayout
    num_layers: int
    budget: int


class Selection:
    """The running selection for one prompt.

    The loop computes all rows in the layers before the first of `check_layers`, calls `narrow` at each of them, and
    computes the kept rows from there on. A selection without check layers is asked once, by `rows`, before layer 0.
    """

    check_layers: tuple[int, ...] = ()

    def rows(self) -> torch.Tensor:
        """Return the rows to recompute in every layer, ascending; only asked when there are no check layers."""
        raise AssertionError(f"{type(self).__name__} selects at its check layers")

    def narrow(self, layer: int, rows: torch.Tensor, fresh: LayerKV, stored: LayerKV) -> torch.Tensor:
        """Return which of `rows` to go on with.

        Parameters
        ----------
        layer : int
            One of `check_layers`.
        rows : torch.Tensor
            The candidates still in the race, ascending, int64.
        fresh, stored : LayerKV
            This layer's KV of those rows, as just computed and as stored (moved into place),
            ``(1, num_kv_heads, len(rows), head_dim)``.

        Returns
        -------
        torch.Tensor
            A subset of `rows`, ascending.
        """
        raise AssertionError(f"{type(self).__name__} has no check layers")


class Selector(ABC):
    """A way to choose the rows that are recomputed; stateless, one object serves all prompts."""

    name: ClassVar[str]

    def __init__(self, config: BlendConfig) -> None:
        self.config = config

    @abstractmethod
    def begin(self, task: SelectionTask) -> Selection:
        """Return the selection for one prompt."""

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if this selector cannot work on a model of `num_layers` layers."""
        del num_layers
