"""Two processes on the same documents, killed: the command in short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_nothing_is_stale_after_kills(tmp_path: Path, kills: int) -> None:
    state = tmp_path / "state.json"
    command = [sys.executable, "-m", "tests.faults.documents", "--state", str(state), "--kills"]
    for count in (kills // 2, kills):
        done = subprocess.run(
            [*command, str(count)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{count} of {count} kills, 0 flaws" in done.stdout
    # Something was there to go stale.
    looked = [line for line in state.with_name("state.json.log").read_text().splitlines() if line.startswith("looked")]
    assert any(line != "looked 0" for line in looked)
