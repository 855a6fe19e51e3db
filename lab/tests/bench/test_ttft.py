"""The bench on a tiny shape: what is compared is the same prompt, and the figures are complete."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cacheblend_lab.bench.pml import PMLBench
from cacheblend_lab.bench.settings import PMLSetting, TPOTSetting, TTFTSetting
from cacheblend_lab.bench.shapes import SHAPES, shape_config
from cacheblend_lab.bench.tpot import TPOTBench
from cacheblend_lab.bench.ttft import TTFTBench
from cacheblend_rag.errors import CacheBlendError, ConfigError
from tests.command import run
from tests.limits import one_thread as one_thread

SETTING = TTFTSetting("tiny", chunks=3, chunk_tokens=20, question_tokens=5, ratios=(0.0, 0.15, 1.0), repeats=2)


@pytest.fixture(scope="module")
def bench() -> TTFTBench:
    return TTFTBench(SETTING)


def test_every_method_answers_the_same_prompt(bench: TTFTBench) -> None:
    assert len(bench.token_ids) == 1 + 3 * 20 + 5
    ids = torch.tensor([bench.token_ids])
    with torch.no_grad():
        own = bench.engine.model(input_ids=ids).logits[0, -1]
    blended = bench.engine.prefill(
        bench.prompt, blend=bench.engine.blend.replace(selector="hkvd", recompute_ratio=0.999)
    )
    assert blended.token_ids == bench.token_ids
    torch.testing.assert_close(blended.logits, own, atol=1e-4, rtol=0)


def test_the_rows_are_complete(bench: TTFTBench) -> None:
    calls: list[str] = []
    rows = bench.measure(calls.append)
    assert [(row.method, row.selector, row.recompute_ratio) for row in rows] == [
        ("full", None, None),
        ("prefix_cache", None, None),
        ("ready", None, None),
        ("reuse", "none", 0.0),
        ("blend", "hkvd", 0.15),
        ("blend", "hkvd", 1.0),
    ]
    assert calls[-1] == "measuring, 18 of 18"
    full, prefix_cache, ready, reuse, blend, _ = rows
    assert [row.method for row in rows if row.of_ready] == ["reuse"]
    assert (full.speedup, full.charged_ratio, full.limit) == (1.0, 1.0, 1.0)
    assert prefix_cache.charged_ratio == pytest.approx(2 / 3)
    assert prefix_cache.limit == pytest.approx(66 / 45)
    assert ready.charged_ratio == reuse.charged_ratio == 0
    assert ready.limit == pytest.approx(66 / 5)
    assert reuse.limit == pytest.approx(66 / 6)
    # One layer of four in full, and 0.15 of the other three, and a probe.
    assert 0.25 + 0.75 * 0.15 <= blend.charged_ratio < 0.5
    for row in rows:
        assert 0 < row.ttft_min_s <= row.ttft_s <= row.ttft_max_s


def test_tiers_are_measured_side_by_side(tmp_path: Path) -> None:
    tiers = ("ram", "disk", "device")
    setting = TTFTSetting("tiny", 3, 20, 5, ratios=(0.15,), tiers=tiers, folder=tmp_path, repeats=2)
    with TTFTBench(setting) as bench:
        rows = bench.measure()
        share = bench.cached_share_after_drop()
        for tier in ("ram", "disk", "device", "ram", "disk", "device"):
            assert {chunk.tier for chunk in bench._blend(tier, "hkvd", 0.15).chunks} == {tier}
    assert share is None or 0 <= share <= 1
    assert [(row.method, row.tier) for row in rows] == [
        ("full", None),
        ("prefix_cache", None),
        ("ready", None),
        ("blend", "ram"),
        ("blend", "disk"),
        ("blend", "device"),
    ]
    # What lies on the device is not loaded.
    assert rows.pop().load_bytes == 0
    for row in rows[:3]:
        assert (row.over_ram, row.load_s, row.load_bytes) == (None, None, None)
    assert rows[3].over_ram == 1
    # Three of the four layers of 60 tokens in float32: the first is computed in full.
    assert {row.load_bytes for row in rows[3:]} == {3 * 60 * 2 * 32 * 4}
    for row in rows[3:]:
        assert row.over_ram is not None and row.load_s is not None and 0 < row.load_s < row.ttft_s
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model(name: str) -> None:
    config = shape_config(name)
    # On no device: the layers are made, their numbers are not.
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    millions = {"smollm2-360m": 362, "qwen2-0.5b": 494, "qwen2.5-7b": 7616}
    millions |= {"llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "llama-3.1-8b": 8030}
    if name in millions:
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions[name]


def test_an_emulated_device_is_as_slow_as_it_says() -> None:
    setting = TTFTSetting(shape="tiny", chunks=2, chunk_tokens=40, ratios=(0.15,), tiers=("ram", "1MB/s"), repeats=1)
    with TTFTBench(setting) as bench:
        rows = {row.tier: row for row in bench.measure() if row.method == "blend"}
    assert set(rows) == {"ram", "1MB/s"}
    slow = rows["1MB/s"]
    assert slow.load_bytes and slow.load_bytes == rows["ram"].load_bytes
    # What comes last cannot be there before all of it could have come.
    assert slow.ttft_min_s >= slow.load_bytes / 1e6


TOKEN_BYTES = 4 * 2 * 2 * 16 * 4


def test_the_rows_of_eviction_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment says nothing here.
    monkeypatch.setenv("CACHEBLEND_KV_CAPACITY", "1")
    monkeypatch.setenv("CACHEBLEND_ENABLED", "false")
    calls: list[str] = []
    setting = TPOTSetting("tiny", 3, 20, 5, output_tokens=4, capacities=(0.25, 7), selector="hkvd", repeats=2)
    with TPOTBench(setting) as bench:
        rows = bench.measure(calls.append)
        assert len(bench.token_ids) == 1 + 60 + 5
    assert calls[-1] == "measuring, 18 of 18"
    kept = {None: 60, 0.25: 15, 7: 7}
    assert [(row.method, row.kv_capacity) for row in rows] == [(m, c) for m in ("full", "blend") for c in kept]
    for row in rows:
        assert row.evicted_tokens == 60 - kept[row.kv_capacity]
        assert row.kv_bytes == (6 + kept[row.kv_capacity]) * TOKEN_BYTES
        assert row.kv_bytes_before == 66 * TOKEN_BYTES
        assert 0 < row.tpot_min_s <= row.tpot_s <= row.tpot_max_s
        assert row.ttft_s > 0
        assert row.output_tokens == 4
        if row.kv_capacity is None:
            assert (row.tpot_speedup, row.ttft_added) == (1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TPOTBench(TPOTSetting("tiny", capacities=(2.0,))), "kv_capacity=2.0"),
        (lambda: TPOTBench(TPOTSetting("round")), "shape 'round' is unknown"),
        (lambda: TTFTBench(TTFTSetting("tiny", chunks=9, chunk_tokens=500)), "window"),
    ],
)
def test_settings_that_fit_no_model_are_refused_before_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(CacheBlendError, match=message):
        make()


SCHEMAS = PMLSetting("tiny", modules=3, module_tokens=20, new_tokens=6, argument_tokens=2, repeats=2)


def test_both_sides_prefill_the_same_prompt() -> None:
    with PMLBench(SCHEMAS) as bench:
        layout, prompt = bench.layout, bench.schemas.prompt(bench.prompt)
        assert (len(layout), layout.context_tokens) == (1 + 60 + 4, 58)
        engine = bench.engine
        full = engine.prefill(prompt, blend=engine.blend.replace(selector="full", recompute_ratio=0.999))
        with torch.no_grad():
            own = engine.model(
                input_ids=torch.tensor([layout.token_ids]),
                position_ids=torch.tensor([layout.positions]),
                past_key_values=DynamicCache(),
            ).logits[0, -1]
        torch.testing.assert_close(full.logits, own, atol=1e-4, rtol=0)
        assert engine.prefill(prompt).report.recomputed_tokens == 0


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = "bench pml --shape tiny --modules 3 --module-tokens 20 --new-tokens 6 --argument-tokens 2 --repeats 1"
    run(arguments, "--selectors", "none,hkvd", "--tier", "disk", "--folder", tmp_path, "--json", file)
    whole = json.loads(file.read_text())
    methods = [("full", None), ("cached", "none"), ("cached", "hkvd")]
    assert [(row["method"], row["selector"]) for row in whole["rows"]] == methods
    # Four layers of 58 tokens in float32.
    assert whole["rows"][1]["load_bytes"] == 4 * 58 * 2 * 32 * 4
    assert whole["setting"]["cached_tokens"] == 58
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_an_unknown_selector_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown selector 'best'"):
        PMLBench(replace(SCHEMAS, selectors=("none", "best")))
