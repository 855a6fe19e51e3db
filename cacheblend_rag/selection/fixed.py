"""Selectors that decide before the first layer: none, full, random and boundary."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from cacheblend_rag.selection.base import Selection, SelectionTask, Selector

__all__ = ["BoundarySelector", "FixedSelection", "FullSelector", "NoneSelector", "RandomSelector"]


class FixedSelection(Selection):
    """The same rows in every layer, or in the layers before one.

    Parameters
    ----------
    rows : torch.Tensor
        The rows to recompute, ascending, int64.
    stop_layer : int, optional
        The layer from which on they are not computed any more.
    """

    def __init__(self, rows: torch.Tensor, stop_layer: int | None = None) -> None:
        self._rows = rows
        self.stop_layer = stop_layer

    def rows(self) -> torch.Tensor:
        return self._rows


@dataclass(frozen=True, kw_only=True)
class NoneSelector(Selector):
    """Plain reuse: stored KV moved into place and nothing recomputed (PIE in the A3 paper, section 5)."""

    name = "none"

    def begin(self, task: SelectionTask) -> Selection:
        return FixedSelection(task.layout.context_rows[:0])


@dataclass(frozen=True, kw_only=True)
class FullSelector(Selector):
    """Every candidate, whatever the ratio."""

    name = "full"

    def begin(self, task: SelectionTask) -> Selection:
        return FixedSelection(task.layout.context_rows)


@dataclass(frozen=True, kw_only=True)
class RandomSelector(Selector):
    """The control: rows drawn without replacement, the same ones for the same prompt and `seed`."""

    name = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise self.refusal("seed", "must be a whole number of 64 bits")

    def begin(self, task: SelectionTask) -> Selection:
        candidates = task.layout.context_rows
        # Seeded by the prompt as well: with one seed for all prompts of a length, "random" would be one fixed pattern.
        ids = torch.tensor(task.layout.token_ids, dtype=torch.int64).numpy().tobytes()
        digest = hashlib.blake2b(ids, digest_size=7, salt=self.seed.to_bytes(8, "little", signed=True)).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.randperm(candidates.numel(), generator=generator)[: task.budget]
        return FixedSelection(candidates[drawn.sort().values])


@dataclass(frozen=True, kw_only=True)
class BoundarySelector(Selector):
    """The first tokens of each chunk (LegoLink in EPIC, arXiv 2410.15332; a baseline of A3, section 5); costs nothing to choose.

    They lean most on what stands before the chunk, which is not here what its KV was read behind. A prompt's first chunk comes
    last, when all others are recomputed: nothing stands before it that its KV has not seen.
    """

    name = "boundary"

    def begin(self, task: SelectionTask) -> Selection:
        """Return the tokens nearest to a border, as many of each chunk as the budget allows, nearer ones first."""
        layout = task.layout
        places = torch.zeros(len(layout), dtype=torch.int64)
        for span in layout.chunks:
            places[span.start : span.stop] = torch.arange(len(span)) + (0 if span.follows else len(layout))
        rows = layout.context_rows
        nearest = places[rows].argsort(stable=True)[: task.budget]
        return FixedSelection(rows[nearest.sort().values])
