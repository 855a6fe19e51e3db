"""The tokens at the borders of chunks (LegoLink in EPIC, arXiv 2410.15332; a baseline of A3, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cacheblend_rag.selection.base import Selection, SelectionTask, Selector
from cacheblend_rag.selection.fixed import FixedSelection

__all__ = ["BoundarySelector"]


@dataclass(frozen=True, kw_only=True)
class BoundarySelector(Selector):
    """The first tokens of each chunk; costs nothing to choose.

    Encoded on its own, a chunk's first tokens take the attention that belongs to the beginning of the prompt; recomputed in
    their place, they no longer do.

    Attributes
    ----------
    ends : {"first", "both"}
        Whether it takes the first tokens of each chunk, or the last ones as well.
    """

    name = "boundary"
    ends: Literal["first", "both"] = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ends not in ("first", "both"):
            raise self.refusal("ends", 'must be "first" or "both"')

    def begin(self, task: SelectionTask) -> Selection:
        """Return the tokens nearest to a border, as many of each chunk as the budget allows, nearer ones first."""
        layout = task.layout
        places = torch.full((len(layout),), len(layout))
        for span in layout.chunks[layout.exact_chunks :]:
            forward = torch.arange(len(span))
            if self.ends == "both":
                forward = torch.minimum(2 * forward, 2 * forward.flip(0) + 1)
            places[span.start : span.stop] = forward
        rows = layout.candidate_rows
        nearest = places[rows].argsort(stable=True)[: task.budget]
        return FixedSelection(rows[nearest.sort().values])
