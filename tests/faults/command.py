"""The fault commands as tests run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def output_of(module: str, *arguments: object) -> str:
    """Run ``python -m tests.faults.MODULE`` in one thread, see that it succeeds, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
