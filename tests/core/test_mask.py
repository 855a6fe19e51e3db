"""Attention over row blocks against attention over the whole mask."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.fuse import mask as fuse_mask
from cacheblend_rag.fuse.mask import RowMask, attend_in_blocks
from cacheblend_rag.model import replace_attention
from tests.families import tiny_model, tiny_tokenizer, words

_COLUMNS = 900


def _rows(count: int) -> torch.Tensor:
    return torch.randperm(_COLUMNS, generator=torch.Generator().manual_seed(count))[:count].sort().values


def _causal(rows: torch.Tensor, columns: int) -> torch.Tensor:
    return (torch.arange(columns) <= rows[:, None])[None, None]


def _attention_function() -> object:
    return AttentionInterface().get_interface("sdpa", sdpa_attention_forward)


class _Grouped(nn.Module):
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("count", [130, 500, 777])
def test_blocks_give_what_the_whole_mask_gives(
    count: int, window: int | None, kept_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_mask, "_KEPT_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(count)
    rows = _rows(count)
    query = torch.randn(1, 6, count, 16, generator=generator).to(dtype)
    key, value = (torch.randn(1, 2, _COLUMNS, 16, generator=generator).to(dtype) for _ in range(2))
    plain = _causal(rows, _COLUMNS)
    if window is not None:
        plain = plain & (torch.arange(_COLUMNS) > rows[:, None] - window)
    wanted = sdpa_attention_forward(_Grouped(), query, key, value, plain, scaling=0.3)[0]
    mask = RowMask.over(plain)
    assert isinstance(mask, RowMask)
    for _ in range(2):
        got, weights = attend_in_blocks(
            sdpa_attention_forward, _Grouped(), query, key, value, mask, dropout=0.0, scaling=0.3, is_causal=True
        )
        assert weights is None
        assert got.is_contiguous()
        # One unit in the last place of bfloat16 at 1.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_a_mask_and_its_position_bias_are_left_to_the_function() -> None:
    query, key, value = (torch.randn(1, 2, n, 16) for n in (130, 200, 200))
    bias = torch.randn(1, 2, 130, 200)
    plain = _causal(torch.arange(70, 200), 200)
    mask = RowMask.over(plain)
    assert isinstance(mask, RowMask)
    got = attend_in_blocks(sdpa_attention_forward, nn.Module(), query, key, value, mask, position_bias=bias)[0]
    wanted = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.masked_fill(~plain, -torch.inf)
    ).transpose(1, 2)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_each_head_may_have_its_own_mask_and_values_another_width() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 4, n, 16, generator=generator) for n in (300, _COLUMNS))
    value = torch.randn(1, 4, _COLUMNS, 24, generator=generator)
    distances = _rows(300)[:, None] - torch.arange(_COLUMNS)
    plain = (distances >= 0) & (distances[None] < torch.tensor([30, 100, 500, 900])[:, None, None])
    mask = RowMask.over(plain[None])
    assert isinstance(mask, RowMask)
    got = attend_in_blocks(sdpa_attention_forward, nn.Module(), query, key, value, mask)[0]
    wanted = functional.scaled_dot_product_attention(query, key, value, attn_mask=plain[None]).transpose(1, 2)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_only_the_models_of_the_block_and_its_thread_attend_by_another_function() -> None:
    with replace_attention(attend_in_blocks), ThreadPoolExecutor(1) as other:
        assert _attention_function() is not sdpa_attention_forward
        assert other.submit(_attention_function).result() is sdpa_attention_forward
    assert _attention_function() is sdpa_attention_forward


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_a_blended_prefill_attends_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine_settings(strict=True, self_check=False, selector="random", recompute_ratio=0.7)
    chunks = [Chunk(words(110, seed), f"n{seed}") for seed in range(3)]
    prompt = BlendPrompt("t5", ["n0", "n1", "n2"], "t6 t7")
    attended: list[int] = []
    attend = RowMask.attend

    def noted(mask: RowMask, query: torch.Tensor, *args: Any) -> torch.Tensor:
        attended.append(query.shape[2])
        return attend(mask, query, *args)

    monkeypatch.setattr(RowMask, "attend", noted)
    with BlendEngine(tiny_model(family), tiny_tokenizer(), **settings) as engine:
        engine.add(chunks)
        got = engine.prefill(prompt)
        assert engine.decoder is not None
        assert len(attended) == engine.decoder.num_layers
        assert set(attended) == {got.report.recomputed_tokens + got.report.prompt_tokens - got.report.context_tokens}
        attended.clear()
        monkeypatch.setattr("cacheblend_rag.fuse.steer.attend_in_blocks", lambda call, *args, **kw: call(*args, **kw))
        wanted = engine.prefill(prompt)
        assert not attended
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-4, rtol=0)


def test_a_function_of_the_users_own_is_not_replaced() -> None:
    def own(*args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs

    query, key = torch.randn(1, 2, 300, 16), torch.randn(1, 2, _COLUMNS, 16)
    mask = RowMask.over(_causal(_rows(300), _COLUMNS))
    assert isinstance(mask, RowMask)
    args, kwargs = attend_in_blocks(own, nn.Module(), query, key, key, mask, scaling=0.3)
    assert args[1:] == (query, key, key, mask) and kwargs == {"scaling": 0.3}


def test_few_rows_keep_a_plain_mask() -> None:
    assert type(RowMask.over(_causal(torch.arange(0, 200, 4), 300))) is torch.Tensor


def test_rows_that_see_nothing_keep_a_plain_mask() -> None:
    mask = _causal(_rows(200), _COLUMNS)
    mask[:, :, :80] = False
    assert type(RowMask.over(mask)) is torch.Tensor
