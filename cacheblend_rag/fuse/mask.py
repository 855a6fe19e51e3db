"""Masks for rows that are not contiguous, and attention that skips what they mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

__all__ = ["RowMask", "row_mask"]

_BLOCK_ROWS = 64
_MOST_BLOCKS = 8


def row_mask(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the causal mask of rows with gaps between them.

    Parameters
    ----------
    rows : torch.Tensor
        The computed rows, ascending, int64.
    columns : int
        Length of the prompt.

    Returns
    -------
    torch.Tensor
        True where a row may attend, bool, ``(1, 1, len(rows), columns)``.
    """
    return (torch.arange(columns, device=rows.device)[None, :] <= rows[:, None])[None, None]


class RowMask(torch.Tensor):
    """A boolean attention mask, ``(1, heads or 1, rows, columns)``, that knows behind which column each row sees
    nothing.

    An attention kernel that is given a mask computes every score and drops half of them; given a causal flag it skips
    that half, but the flag is wrong for rows with gaps between them. When this mask reaches
    ``scaled_dot_product_attention``, the rows are computed in a few blocks, each over the columns that its last row
    sees: the same result, and most of the saving. Anything else sees a plain tensor.
    """

    _blocks: list[tuple[slice, int]]

    @classmethod
    def over(cls, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return `mask` with its knowledge of `rows`, or as it is where blocks would not pay.

        Parameters
        ----------
        mask : torch.Tensor
            The mask.
        rows : torch.Tensor
            The row of the prompt that each row of the mask stands for, ascending.

        Returns
        -------
        torch.Tensor
            A mask of the same contents.
        """
        count = min(rows.numel() // _BLOCK_ROWS, _MOST_BLOCKS)
        # Measured on the CPU only: on a GPU, more and smaller kernels may cost more than they save.
        if count < 2 or mask.device.type != "cpu" or mask.dtype != torch.bool:
            return mask
        known = mask.as_subclass(cls)
        bounds = [number * rows.numel() // count for number in range(count + 1)]
        known._blocks = [(slice(start, stop), int(rows[stop - 1]) + 1) for start, stop in pairwise(bounds)]
        return known

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute attention in blocks, and everything else as for a plain tensor."""
        options = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            mask = options.get("attn_mask")
            if func is functional.scaled_dot_product_attention and isinstance(mask, cls) and len(args) == 3:
                del options["attn_mask"]
                query, key, value = args
                return torch.cat(
                    [
                        func(
                            query[:, :, rows],
                            key[:, :, :columns],
                            value[:, :, :columns],
                            attn_mask=mask[:, :, rows, :columns],
                            **options,
                        )
                        for rows, columns in mask._blocks
                    ],
                    dim=2,
                )
            return func(*args, **options)
