"""The example runs as it is written, on real MiniLM, Chroma and the reference model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_index_query_engine.py"


def test_the_example_runs_and_every_chunk_hits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    hits = re.findall(r"^  (\d+) of (\d+) chunks hit", done.stdout, re.MULTILINE)
    assert len(hits) == 4
    assert all(hit == total == "12" for hit, total in hits)
