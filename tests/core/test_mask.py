"""Attention over row blocks against attention over the whole mask."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.fuse import mask as fuse_mask
from cacheblend_rag.fuse.mask import RowMask, attend_folded, attend_in_blocks
from tests.families import tiny_model, tiny_tokenizer, words

_COLUMNS = 900


class _Grouped(nn.Module):
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("kind", ["causal", "window", "by head", "bias"])
def test_blocks_give_what_the_whole_mask_gives(
    kind: str, kept_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_mask, "_KEPT_BYTES", kept_bytes)
    count, generator = 333, torch.Generator().manual_seed(0)
    rows = torch.randperm(_COLUMNS, generator=generator)[:count].sort().values
    query = torch.randn(1, 6, count, 16, generator=generator).to(dtype)
    # Values of another width than keys.
    key, value = (torch.randn(1, 2, _COLUMNS, width, generator=generator).to(dtype) for width in (16, 24))
    more: dict[str, Any] = {}
    distances = rows[:, None] - torch.arange(_COLUMNS)
    plain = (distances >= 0)[None, None]
    if kind == "window":
        plain = plain & (distances < 40)
    elif kind == "by head":
        plain = plain & (distances < torch.tensor([30, 100, 500, 900, 7, 900])[:, None, None])
    wanted_mask = plain
    if kind == "bias":
        more["position_bias"] = torch.randn(1, 6, count, _COLUMNS, generator=generator).to(dtype)
        wanted_mask = more["position_bias"].masked_fill(~plain, -torch.inf)
    wanted = sdpa_attention_forward(_Grouped(), query, key, value, wanted_mask, scaling=0.3)[0]
    mask = RowMask.over(plain)
    assert isinstance(mask, RowMask)
    for _ in range(2):
        options = {"dropout": 0.0, "scaling": 0.3, "is_causal": True} | more
        got, _ = attend_in_blocks(sdpa_attention_forward, _Grouped(), query, key, value, mask, **options)
        assert got.is_contiguous()
        # One unit in the last place of bfloat16 at 1.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "kind"), [(1, None), (1, "padded"), (4, "causal"), (4, "bias"), (17, "causal")])
def test_folded_heads_give_what_each_head_gives(rows: int, kind: str | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(2, 6, rows, 16, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, _COLUMNS, width, generator=generator).to(dtype) for width in (16, 24))
    mask = None
    if kind == "padded":
        mask = (torch.arange(_COLUMNS) >= torch.tensor([[0], [70]]))[:, None, None]
    elif kind is not None:
        mask = torch.ones(rows, _COLUMNS, dtype=torch.bool).tril(_COLUMNS - rows)[None, None].expand(2, 1, -1, -1)
    if mask is not None and kind == "bias":
        mask = torch.randn(2, 1, rows, _COLUMNS, generator=generator).to(dtype).masked_fill(~mask, -torch.inf)
    wanted = sdpa_attention_forward(_Grouped(), query, key, value, mask, scaling=0.3)[0]
    got, _ = attend_folded(sdpa_attention_forward, _Grouped(), query, key, value, mask, dropout=0.0, scaling=0.3)
    assert got.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_a_blended_prefill_attends_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine_settings(strict=True, self_check=False, selector="random", recompute_ratio=0.7)
    prompt = BlendPrompt("t5", ["n0", "n1", "n2"], "t6 t7")
    with BlendEngine(tiny_model(family), tiny_tokenizer(), **settings) as engine:
        engine.add([Chunk(words(110, seed), f"n{seed}") for seed in range(3)])
        got = engine.prefill(prompt).logits
        monkeypatch.setattr("cacheblend_rag.fuse.steer.attend_in_blocks", lambda call, *args, **kw: call(*args, **kw))
        torch.testing.assert_close(got, engine.prefill(prompt).logits, atol=1e-4, rtol=0)
