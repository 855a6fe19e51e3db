"""``make gpu``: the runner with pieces that need no GPU, and every real piece's command on a tiny model on the CPU."""

import importlib
import json
import os
import re
import shlex
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
import typer

from cacheblend_lab import answers
from cacheblend_lab.gpu import PIECES, Piece, main, page, run_pieces
from tests.cli.conftest import model_folder as model_folder
from tests.command import run
from tests.store.remote.conftest import free_port

ROOT = Path(__file__).parents[2]
_TINY = "cacheblend-rag bench encode --shape tiny --chunks 1 --chunk-tokens 8 --repeats"
GOOD = Piece("good", "adding", f"{_TINY} 1", 1)
BAD = Piece("bad", "a shape that is not there", "cacheblend-rag bench encode --shape none", 1)
SLOW = Piece("slow", "what does not end", f"{_TINY} 1000000", 0.05)
LONG = Piece("long", "what is not begun", f"{_TINY} 1", 60)
TESTS = Piece("tests", "a test", "pytest -q -p no:cacheprovider tests/chat/test_tools.py", 1)


@pytest.mark.full
def test_what_fails_or_is_too_slow_does_not_keep_the_others_from_being_measured(tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_pieces([BAD, GOOD, TESTS], tmp_path, None, 5, lines.append) == [BAD]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gpu-bad.log", "gpu-good.json", "gpu-tests.json"]
    assert "shape 'none' is unknown" in (tmp_path / "gpu-bad.log").read_text()
    good = tmp_path / "gpu-good.json"
    figures = json.loads(good.read_text())
    assert figures["arguments"][:4] == ["bench", "encode", "--shape", "tiny"]
    assert set(figures["machine"]) >= {"gpu", "cuda"}
    tests = json.loads((tmp_path / "gpu-tests.json").read_text())
    (row,) = tests["rows"]
    assert row["passed"] >= 5 and row["skipped"] == 0 and row["seconds"] > 0

    # The next call repeats what failed, and nothing else; nor does it begin what will not end.
    before = good.stat().st_mtime_ns
    assert run_pieces([GOOD, TESTS, SLOW, LONG], tmp_path, None, 0.1, lines.append) == [SLOW]
    assert good.stat().st_mtime_ns == before
    assert lines[-1].endswith("long")
    # Another GPU's figures are measured anew.
    good.write_text(json.dumps({"machine": {"gpu": "another"}, "date": "2020-01-01"}))
    assert run_pieces([GOOD], tmp_path, None, 1, lines.append) == []
    assert json.loads(good.read_text())["machine"]["gpu"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_without_a_gpu_it_says_so_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--docs", str(tmp_path)]) == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# On the CPU in seconds: the last of an option that is given twice counts.
TINY = "--device cpu --dtype float32"
SERVER = f'{sys.executable} -c "from cacheblend_rag.cli.app import app; app()" serve --model $QWEN_15B --backend engine'
SMALL = {
    "bench ttft": f"--shape tiny {TINY} --chunks 2 --chunk-tokens 8 --head-tokens 3 --repeats 1",
    "bench serve": "--corpus 4 --chunks 2 --chunk-words 8 --rates 20 --seconds 1 --output-tokens 2",
    "cacheblend_lab.bench.real": f"{TINY} --tokens 300 --answer-tokens 2 --rounds 1",
    "cacheblend_lab.answers": f"{TINY} --step 100",
}


def test_every_piece_runs_and_the_page_shows_what_it_measured(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for piece in PIECES:
        if piece.is_tests:
            continue
        (tmp_path / piece.name).mkdir()
        for name, value in {
            "QWEN_05B": model_folder,
            "QWEN_15B": model_folder,
            "FOLDER": tmp_path / piece.name,
        }.items():
            monkeypatch.setenv(name, str(value))
        [small] = [options for name, options in SMALL.items() if name in piece.command]
        if "--url" in piece.command:
            small += f" --url http://127.0.0.1:{(port := free_port())} --start '{SERVER} --port {port}'"
        given = os.path.expandvars(f"{piece.command} {small} --json {tmp_path}/gpu-{piece.name}.json")
        program, *command = shlex.split(given)
        monkeypatch.setattr(sys, "argv", [program, *command])
        if program == "python":
            monkeypatch.setattr(sys, "argv", command[1:])
            module = importlib.import_module(command[1])
            with suppress(SystemExit):
                module.main() if module is answers else typer.run(module.main)
        else:
            run(*command)
    text = page(tmp_path)
    for piece in PIECES:
        assert (f"`{piece.command}`" in text) != piece.is_tests
    assert text.endswith("\nNot measured yet: tests.\n")
    rows = re.findall(r"^\| (reuse|gapless) \| none \| 0 \| (ram|disk) \|", text, re.MULTILINE)
    shapes = sum(piece.name.startswith("ttft") for piece in PIECES)
    assert set(rows) == set(product(("gapless", "reuse"), ("disk", "ram")))
    assert len(rows) == 4 * shapes


def test_the_page_that_is_committed_is_the_one_its_figures_make() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == page(ROOT / "docs" / "results")
