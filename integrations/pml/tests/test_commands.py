"""``cacheblend-rag pml check``, and the paper's three applications, as the examples and the command run them."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli.app import app
from tests.cli.conftest import Command, read_rows
from tests.cli.conftest import model_folder as model_folder
from tests.cli.conftest import run as run

SCHEMA = """<schema name="trip">
  <module name="plan">Away for <param name="days" len="9"/>.</module>
  <union><module name="rome">Rome</module><module name="oslo">Oslo town</module></union>
</schema>"""
PROMPT = '<prompt schema="trip"><plan days="a week"/><rome/>Where?</prompt>'


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "trip.pml"
    path.write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "rome.pml").write_text(PROMPT, encoding="utf-8")
    return path


def test_check_says_what_a_schema_has(run: Command, schema: Path) -> None:
    assert run("pml", "check", schema, "--prompt", schema.with_name("rome.pml")).output.splitlines() == [
        "trip: a valid schema with 3 modules, 1 union, 1 parameter",
        "rome.pml: a prompt with 2 imports",
    ]


def test_check_says_what_is_wrong_and_where(run: Command, schema: Path, model_folder: Path) -> None:
    schema.write_text(SCHEMA.replace("</union>", ""), encoding="utf-8")
    assert "error: trip.pml, line 4: " in run("pml", "check", schema, code=1).output
    schema.write_text(SCHEMA, encoding="utf-8")
    prompt = schema.with_name("rome.pml")
    prompt.write_text(PROMPT.replace("a week", "fourteen days"), encoding="utf-8")
    done = run("pml", "check", schema, "--prompt", prompt, "--model", model_folder, code=1)
    assert "13 tokens, 4 more than the 9" in done.output
    schema.write_text(f'<schema name="trip">{"x" * 9000}</schema>', encoding="utf-8")
    assert "window is 8192" in run("pml", "check", schema, "--model", model_folder, code=1).output


def test_check_prints_the_layout(run: Command, schema: Path, model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--prompt", schema.with_name("rome.pml"), "--model", model_folder, "--json", figures)
    shown = run("pml", "check", schema, *arguments).output
    found = read_rows(figures)
    rows = {row["name"]: row for row in found if row["of"] == "schema"}
    assert (rows["plan"]["start"], rows["plan"]["stop"], rows["plan"]["slots"]) == (1, 21, [[10, 19]])
    assert rows["rome"]["start"] == rows["oslo"]["start"] == 21
    # Two heads of eight numbers, key and value, four layers, four bytes each.
    assert rows["oslo"]["cached_bytes"] == 9 * 2 * 8 * 2 * 4 * 4
    assert "30 positions; 33 tokens of KV" in shown and "21-29" in shown
    assert "28 tokens, 15 from kept KV and 13 computed" in shown
    assert [(row["name"], row["start"], row["stop"]) for row in found if row["of"] == "rome.pml"] == [
        ("BOS", 0, 1),
        ("plan", 1, 10),
        ("plan days", 10, 16),
        ("plan", 19, 21),
        ("rome", 21, 25),
        ("new text", 25, 31),
    ]


EXAMPLES = Path(__file__).parents[3] / "examples" / "pml"


def printed(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.argv", [name, "reference"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_files_are_modules_that_are_edited(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed("code_generation", capsys, monkeypatch)
    assert "\n7 hits" in out
    assert out.rstrip().endswith("after an edit: 1 of 7 parts encoded")


@pytest.mark.parametrize("name", ["personalization", "travel_plan"])
def test_every_module_hits(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.findall(r"^  (\d+) hits, (\d+) misses", printed(name, capsys, monkeypatch), re.MULTILINE)
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
    arguments = [
        "pml",
        "run",
        str(folder / f"{file}.pml"),
        "--model",
        "reference",
        "--store",
        str(tmp_path / "kv"),
        "--max-new-tokens",
        "4",
    ]
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
        result = CliRunner().invoke(app, ["pml", "run", str(prompt), "--model", "reference"])
        assert result.exit_code == 1 and "--schema FILE" in result.output, result.output
