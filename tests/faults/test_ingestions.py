"""Ingestions through a framework, killed: the command in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.command import output_of


@pytest.mark.parametrize("framework", ["llama_index", pytest.param("langchain", marks=pytest.mark.full)])
def test_nothing_is_left_and_nothing_lost_after_a_kill(tmp_path: Path, framework: str) -> None:
    said = output_of("ingestions", "--framework", framework, "--kills", 1, "--state", tmp_path / "state.json")
    assert "1 of 1 kills, 0 flaws" in said
