"""Selectors that know from ingestion which tokens depend on their neighbours."""

from __future__ import annotations

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.selection.base import Selection, SelectionTask, Selector
from cacheblend_rag.selection.fixed import FixedSelection
from cacheblend_rag.selection.question import SEGMENT_TOKENS, QuerySelection, QuerySelector, rows_before, stop_layer
from cacheblend_rag.selection.segments import pick, segment_means, segment_numbers

__all__ = ["IngestSelector", "QueryIngestSelector", "candidate_sensitivity"]


def candidate_sensitivity(task: SelectionTask) -> torch.Tensor:
    """Return how sensitive each candidate is to its context, ``(num_candidates,)``, float32.

    Of chunks that were added without it being measured, every token counts as much as the average of the others.
    """
    rows = task.layout.candidate_rows
    if task.sensitivity is None:
        return torch.ones(rows.numel())
    known = task.sensitivity[rows]
    average = known[~known.isnan()].mean() if (~known.isnan()).any() else torch.tensor(1.0)
    return torch.where(known.isnan(), average, known)


class IngestSelector(Selector):
    """The tokens whose KV moved most when their chunk was encoded behind neighbours, at ingestion.

    Nothing is computed to choose them when a question comes.
    """

    name = "ingest"
    needs_sensitivity = True

    def begin(self, task: SelectionTask) -> Selection:
        """Return the most sensitive candidates."""
        depth = stop_layer(self.config, task.num_layers)
        rows = task.layout.candidate_rows
        segment_tokens = self.config.segment_tokens or SEGMENT_TOKENS
        return FixedSelection(
            pick(candidate_sensitivity(task), rows, rows_before(depth, task), task.layout, segment_tokens), depth
        )

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if a layer that the settings name is not there."""
        stop_layer(self.config, num_layers)


class QueryIngestSelector(QuerySelector):
    """What the question attends to, times what its chunk's context changes.

    A segment that the question needs, but that is the same in any context, need not be recomputed; nor need one that depends
    on its context, but that the question does not ask about.
    """

    name = "query_ingest"
    needs_sensitivity = True

    def begin(self, task: SelectionTask) -> Selection:
        """Return a selection that looks at the question's attention, weighted by sensitivity."""
        return _QueryIngestSelection(task, self.config)


class _QueryIngestSelection(QuerySelection):
    def __init__(self, task: SelectionTask, config: BlendConfig) -> None:
        super().__init__(task, config)
        self._sensitivity = candidate_sensitivity(task)

    def scores(self) -> torch.Tensor:
        """Return the attention of each candidate's segment, times its sensitivity."""
        numbers = segment_numbers(self._layout, self._candidates, self._segment_tokens)
        return segment_means(super().scores(), numbers) * segment_means(self._sensitivity, numbers)
