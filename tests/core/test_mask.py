"""Attention over row blocks against attention over the whole mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cacheblend_rag.fuse.mask import RowMask, row_mask


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("count", [130, 500, 777])
def test_blocks_give_what_the_whole_mask_gives(count: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(count)
    columns = 900
    query, key, value = (torch.randn(1, 4, n, 16, generator=generator) for n in (count, columns, columns))
    rows = torch.randperm(columns, generator=generator)[:count].sort().values
    plain = row_mask(rows, columns)
    if window is not None:
        plain = plain & (torch.arange(columns) > rows[:, None] - window)
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=plain, scale=0.3)
    mask = RowMask.over(plain, rows)
    assert isinstance(mask, RowMask)
    got = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.0, scale=0.3)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_few_rows_keep_a_plain_mask() -> None:
    rows = torch.arange(0, 200, 4)
    assert type(RowMask.over(row_mask(rows, 300), rows)) is torch.Tensor


def test_the_mask_lets_each_row_see_itself_and_what_is_before_it() -> None:
    mask = row_mask(torch.tensor([0, 3]), 5)
    assert mask.tolist() == [[[[True, False, False, False, False], [True, True, True, True, False]]]]
