"""Damaged stores heal: the command in short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.command import output_of


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_every_question_is_answered(tmp_path: Path, count: int) -> None:
    state = tmp_path / "state.json"
    for share in (count // 2, count):
        said = output_of("damage", "--state", state, "--count", share)
        assert f"{share} of {share} damages, 0 flaws" in said
    assert len(json.loads(state.read_text())) == count
