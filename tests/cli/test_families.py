"""``cacheblend-rag models``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Command


@pytest.mark.filterwarnings("ignore")
def test_one_family_is_shown_layer_by_layer(run: Command, tmp_path: Path) -> None:
    result = run("models", "gemma3_text", "--markdown", str(tmp_path / "model.md"))
    assert result.exit_code == 0
    assert "gemma3_text: exact" in result.output
    assert result.output.count("sliding of 16") == 5
    lines = (tmp_path / "model.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) == 8


@pytest.mark.filterwarnings("ignore")
def test_a_refused_family_says_why(run: Command) -> None:
    result = run("models", "mamba")
    assert result.exit_code == 0
    assert "mamba: refused: MambaForCausalLM has layers of type linear_attention" in result.output


def test_a_loaded_model_is_shown_too(run: Command) -> None:
    result = run("models", "reference")
    assert result.exit_code == 0
    assert "reference: exact" in result.output and "LlamaForCausalLM" in result.output


@pytest.mark.parametrize("arguments", [[], ["llama", "--all"]])
def test_it_wants_one_name_or_all(run: Command, arguments: list[str]) -> None:
    assert "--all" in run("models", *arguments, code=1).output
