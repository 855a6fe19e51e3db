"""``cacheblend-rag families`` and ``cacheblend-rag models``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Command


@pytest.mark.filterwarnings("ignore")
def test_one_family_is_shown_layer_by_layer(run: Command, tmp_path: Path) -> None:
    result = run("families", "gemma3_text", "--markdown", str(tmp_path / "model.md"))
    assert result.exit_code == 0
    assert "gemma3_text: exact" in result.output
    assert result.output.count("sliding of 16") == 5
    lines = (tmp_path / "model.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) == 8


@pytest.mark.filterwarnings("ignore")
def test_a_refused_family_says_why(run: Command) -> None:
    result = run("families", "mamba")
    assert result.exit_code == 0
    assert "mamba: refused: MambaForCausalLM has layers of type linear_attention" in result.output


def test_a_loaded_model_is_shown_too(run: Command) -> None:
    result = run("models", "reference")
    assert result.exit_code == 0
    assert "reference: exact" in result.output and "LlamaForCausalLM" in result.output


def test_a_family_that_is_none_is_answered_in_one_line(run: Command) -> None:
    assert "no family 'lama'" in run("families", "lama", code=1).output
