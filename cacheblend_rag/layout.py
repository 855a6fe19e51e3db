"""Layout of a prompt in tokens: its rows, positions and chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

__all__ = ["ChunkSpan", "PromptLayout"]


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One chunk's half-open range of rows in the prompt, and the position of its first token."""

    start: int
    stop: int
    position: int
    # Whether another chunk stands before it, which its KV was not computed behind.
    follows: bool = field(default=True, kw_only=True)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class PromptLayout:
    """The token ids of a prompt and the place of each chunk in it."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    # In prompt order, not overlapping.
    chunks: tuple[ChunkSpan, ...]
    # How many leading rows are taken over from an earlier prompt or a fixed head; they are neither computed nor of a chunk here.
    resumed_rows: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def context_rows(self) -> torch.Tensor:
        """The rows of chunk tokens, ascending, int64."""
        return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in self.chunks)])

    @cached_property
    def text_rows(self) -> torch.Tensor:
        """The rows that are always computed, ascending, int64."""
        is_text = torch.ones(len(self), dtype=torch.bool)
        is_text[: self.resumed_rows] = False
        is_text[self.context_rows] = False
        return is_text.nonzero().flatten()

    @property
    def end_position(self) -> int:
        """The position after the last one used."""
        return max(self.positions) + 1

    @property
    def context_tokens(self) -> int:
        """Number of chunk tokens."""
        return self.context_rows.numel()
