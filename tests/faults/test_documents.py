"""Two processes on the same documents, killed: the command in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.command import output_of


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_nothing_is_stale_after_kills(tmp_path: Path, kills: int) -> None:
    state = tmp_path / "state.json"
    for count in (kills // 2, kills):
        assert f"{count} of {count} kills, 0 flaws" in output_of("documents", "--state", state, "--kills", count)
    # Something was there to go stale.
    looked = [line for line in state.with_name("state.json.log").read_text().splitlines() if line.startswith("looked")]
    assert any(line != "looked 0" for line in looked)
