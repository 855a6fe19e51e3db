"""Ingestions through a framework, killed: the command in short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("framework", ["llama_index", pytest.param("langchain", marks=pytest.mark.full)])
def test_nothing_is_left_and_nothing_lost_after_a_kill(tmp_path: Path, framework: str) -> None:
    command = [sys.executable, "-m", "tests.faults.ingestions", "--framework", framework, "--kills", "1"]
    done = subprocess.run(
        [*command, "--state", str(tmp_path / "state.json")],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 kills, 0 flaws" in done.stdout
