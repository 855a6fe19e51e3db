"""The tokens at the borders of chunks (LegoLink in EPIC, arXiv 2410.15332; a baseline of A3, section 5)."""

from __future__ import annotations

import torch

from cacheblend_rag.selection.base import Selection, SelectionTask, Selector
from cacheblend_rag.selection.fixed import FixedSelection

__all__ = ["BoundarySelector"]


class BoundarySelector(Selector):
    """The first tokens of each chunk, and the last ones too where `BlendConfig.boundary` is "both"; costs nothing to choose.

    Encoded on its own, a chunk's first tokens take the attention that belongs to the beginning of the prompt; recomputed in
    their place, they no longer do.
    """

    name = "boundary"

    def begin(self, task: SelectionTask) -> Selection:
        """Return the tokens nearest to a border, as many of each chunk as the budget allows, nearer ones first."""
        layout = task.layout
        places = torch.full((len(layout),), len(layout))
        for span in layout.chunks[layout.exact_chunks :]:
            forward = torch.arange(len(span))
            if self.config.boundary == "both":
                forward = torch.minimum(2 * forward, 2 * forward.flip(0) + 1)
            places[span.start : span.stop] = forward
        rows = layout.candidate_rows
        nearest = places[rows].argsort(stable=True)[: task.budget]
        return FixedSelection(rows[nearest.sort().values])
