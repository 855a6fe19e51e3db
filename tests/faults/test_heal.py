"""Damaged stores heal: the command in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_every_question_is_answered(tmp_path: Path, count: int) -> None:
    state = tmp_path / "state.json"
    for share in (count // 2, count):
        command = [sys.executable, "-m", "tests.faults.damage", "--state", str(state), "--count", str(share)]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{share} of {share} damages, 0 flaws" in done.stdout
    assert len(json.loads(state.read_text())) == count
