"""The bench of schemas on a tiny shape."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from cacheblend_lab.bench.pml import PMLBench
from cacheblend_lab.bench.settings import PMLSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run

SETTING = PMLSetting("tiny", modules=3, module_tokens=20, new_tokens=6, argument_tokens=2, repeats=2)


def test_both_sides_prefill_the_same_prompt() -> None:
    with PMLBench(SETTING) as bench:
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


@pytest.mark.parametrize("wrong", [{"modules": 0}, {"argument_tokens": 6}, {"tier": "tape"}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(ConfigError):
        replace(SETTING, **wrong)  # type: ignore[arg-type]


def test_an_unknown_selector_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown selector 'best'"):
        PMLBench(replace(SETTING, selectors=("none", "best")))
