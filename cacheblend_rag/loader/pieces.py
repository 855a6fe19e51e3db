"""How the chunks of a prompt are shared out to the threads that load them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.layout import PromptLayout

__all__ = ["Piece", "cut_pieces", "join"]

_CLOSE_ROWS = 32


@dataclass(frozen=True)
class Piece:
    """Chunks that are loaded in one go, with the rows of text between them, which the computation overwrites.

    Attributes
    ----------
    chunks : slice
        Their indices.
    rows : slice
        Their rows, and those between them.
    gaps : tuple of int
        How many rows are between each chunk and the next.
    is_resident : bool
        Whether their KV is on its device.
    """

    chunks: slice
    rows: slice
    gaps: tuple[int, ...]
    is_resident: bool = False


def cut_pieces(layout: PromptLayout, least_rows: int, resident: Sequence[bool]) -> list[Piece]:
    """Group chunks that follow each other closely, so that many small ones cost one copy and one rotation a layer.

    Parameters
    ----------
    layout : PromptLayout
        The prompt.
    least_rows : int
        A piece of so many rows takes no further chunk.
    resident : sequence of bool
        For each chunk whether its KV is on its device; chunks of one piece are alike in that.

    Returns
    -------
    list of Piece
        All chunks, in prompt order.
    """
    pieces: list[Piece] = []
    for index, (span, is_resident) in enumerate(zip(layout.chunks, resident, strict=True)):
        last = pieces[-1] if pieces and pieces[-1].is_resident == is_resident else None
        gap = span.start - last.rows.stop if last else 0
        if last is not None and gap <= _CLOSE_ROWS and last.rows.stop - last.rows.start < least_rows:
            pieces[-1] = Piece(
                slice(last.chunks.start, index + 1), slice(last.rows.start, span.stop), (*last.gaps, gap), is_resident
            )
        else:
            pieces.append(Piece(slice(index, index + 1), slice(span.start, span.stop), (), is_resident))
    return pieces


def join(parts: Sequence[torch.Tensor], gaps: Sequence[int], into: torch.Tensor) -> None:
    """Write `parts`, ``(num_kv_heads, seq_len, head_dim)``, into consecutive rows of `into`, zeros into the gaps between."""
    heads, _, width = parts[0].shape
    pieces = [parts[0]]
    for part, gap in zip(parts[1:], gaps, strict=True):
        if gap:
            pieces.append(part.new_zeros(1, 1, 1).expand(heads, gap, width))
        pieces.append(part)
    torch.cat(pieces, dim=1, out=into)
