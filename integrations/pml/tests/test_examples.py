"""The paper's three applications: as the examples run them, and by the command, on the reference model."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli.app import app

EXAMPLES = Path(__file__).parents[3] / "examples" / "pml"


def run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_files_are_modules_that_are_edited(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("code_generation", capsys, monkeypatch)
    assert "\n7 hits" in out
    assert out.rstrip().endswith("after an edit: 1 of 7 parts encoded")


@pytest.mark.parametrize("name", ["personalization", "travel_plan"])
def test_every_module_hits(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.findall(r"^  (\d+) hits, (\d+) misses", run(name, capsys, monkeypatch), re.MULTILINE)
    assert len(found) == 2
    assert all(int(hits) >= 5 and misses == "0" for hits, misses in found)


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("plan-tokyo", ["#1", "travel-plan", "overseas", "tokyo", "#2"]),
        pytest.param(
            "create-main",
            ["#1", "unit.py", "map.py", "player.py", "game.py", "database.py", "#2"],
            marks=pytest.mark.full,
        ),
        pytest.param("describe-learner", None, marks=pytest.mark.full),
    ],
)
def test_the_command_answers_and_the_next_run_is_warm(file: str, parts: list[str] | None, tmp_path: Path) -> None:
    folder = tmp_path / "pml"
    shutil.copytree(EXAMPLES, folder)
    figures = tmp_path / "run.json"
    arguments = ["pml", "run", str(folder / f"{file}.pml"), "--store", str(tmp_path / "kv"), "--max-new-tokens", "4"]
    for encoded in (True, False):
        result = CliRunner().invoke(app, [*arguments, "--json", str(figures), "--compare"])
        assert result.exit_code == 0, result.output
        assert ("0 of " in result.output.partition("parts encoded")[0]) != encoded
        cached, full = json.loads(figures.read_text())["rows"]
        assert (cached["misses"], cached["recomputed_tokens"]) == (0, 0)
        assert full["recomputed_tokens"] == full["context_tokens"] > 100
        if parts is not None:
            assert [chunk["id"].rpartition("/")[2] for chunk in cached["chunks"]] == parts


def test_a_prompt_without_its_schema_is_told_where_it_is_looked_for(tmp_path: Path) -> None:
    prompt = tmp_path / "ask.pml"
    for name in ("gone", "../pml/travel", ""):
        prompt.write_text(f'<prompt schema="{name}">Hello</prompt>')
        result = CliRunner().invoke(app, ["pml", "run", str(prompt)])
        assert result.exit_code == 1 and "--schema FILE" in result.output, result.output
