"""The example runs as it is written, on real MiniLM, Chroma and the reference model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_chain.py"


def test_the_example_runs_and_every_chunk_hits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    hits = re.findall(r"^  (\d+) of (\d+) chunks hit", capsys.readouterr().out, re.MULTILINE)
    assert len(hits) == 4
    assert all(hit == total for hit, total in hits)
