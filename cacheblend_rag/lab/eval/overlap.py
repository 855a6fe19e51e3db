"""Whether methods recompute the tokens that a question attends to (A3, Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.figures import new_figure

__all__ = ["TokenOverlap", "draw_overlap"]


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """Which tokens a question attends to, and which ones methods recompute.

    Attributes
    ----------
    attention : array of float, (question_tokens, chunk_tokens)
        The question's attention to the tokens of all chunks, under full prefill.
    recomputed : mapping of str to array of int
        For each method, the tokens that it recomputes, by their place among the chunk tokens.
    top : int
        So many tokens, those to which the question attends most in sum, are the high-attention tokens.
    """

    attention: NDArray[np.floating[Any]]
    recomputed: Mapping[str, NDArray[np.integer[Any]]]
    top: int

    def __post_init__(self) -> None:
        if self.attention.ndim != 2 or not 1 <= self.top <= self.attention.shape[1]:
            raise ConfigError(
                f"attention has shape {self.attention.shape} and top={self.top}; "
                "give (question_tokens, chunk_tokens), and a top of at least 1 and at most chunk_tokens"
            )
        for method, tokens in self.recomputed.items():
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.attention.shape[1]:
                raise ConfigError(
                    f"{method!r} recomputes tokens {tokens.min()} to {tokens.max()}, "
                    f"but there are {self.attention.shape[1]} chunk tokens, counted from 0"
                )

    @property
    def high_attention(self) -> NDArray[np.intp]:
        """The high-attention tokens, in order."""
        return np.sort(np.argsort(-self.attention.sum(axis=0), kind="stable")[: self.top])

    def hit_rate(self, method: str) -> float:
        """Return the share of the high-attention tokens that a method recomputes."""
        return float(np.isin(self.high_attention, self.recomputed[method]).mean())


def draw_overlap(overlap: TokenOverlap) -> Any:
    """Draw the question's attention, and which of the tokens it attends to are recomputed (A3, Figure 2).

    Parameters
    ----------
    overlap : TokenOverlap
        One prompt.

    Returns
    -------
    matplotlib Figure
        The figure: attention above; below it a row of high-attention tokens, then a row for each method with the tokens that
        it recomputes, dark where they are high-attention tokens.
    """
    heights = (2.6, 0.3 * (1 + len(overlap.recomputed)))
    figure, [above, below] = new_figure(2, width=11, height=1.2 + sum(heights), stacked=heights)
    high = overlap.high_attention
    rows = np.zeros((1 + len(overlap.recomputed), overlap.attention.shape[1]))
    rows[0, high] = 1.0
    for row, tokens in zip(rows[1:], overlap.recomputed.values(), strict=True):
        row[tokens] = np.where(np.isin(tokens, high), 1.0, 0.35)
    # A few tokens carry most of the attention; with a linear scale nothing else would be seen.
    above.imshow(np.sqrt(overlap.attention), aspect="auto", cmap="Blues", interpolation="nearest")
    above.set(ylabel="question token", title="attention of the question (square root)")
    above.yaxis.get_major_locator().set_params(integer=True)
    below.imshow(rows, aspect="auto", cmap="Greens", vmin=0, vmax=1, interpolation="nearest")
    labels = [f"{method}: {overlap.hit_rate(method):.0%} hit" for method in overlap.recomputed]
    below.set_yticks(range(len(rows)), [f"high attention ({overlap.top})", *labels])
    below.set(xlabel="chunk token")
    return figure
