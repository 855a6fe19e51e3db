"""``cacheblend-rag pml check``, and the paper's three applications, as the examples and the command run them."""

import re
import runpy
import shutil
from pathlib import Path

import pytest

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


def test_check_says_what_is_wrong_and_where(run: Command, schema: Path, model_folder: Path) -> None:
    prompt = schema.with_name("rome.pml")
    assert len(run("pml", "check", schema, "--prompt", prompt).output.splitlines()) == 2
    schema.write_text(SCHEMA.replace("</union>", ""), encoding="utf-8")
    assert "trip.pml, line 4" in run("pml", "check", schema, code=1).output
    schema.write_text(SCHEMA, encoding="utf-8")
    prompt.write_text(PROMPT.replace("a week", "fourteen days"), encoding="utf-8")
    checked = run("pml", "check", schema, "--prompt", prompt, "--model", model_folder, code=1)
    assert "4 more than the 9" in checked.output
    schema.write_text(f'<schema name="trip">{"x" * 9000}</schema>', encoding="utf-8")
    assert "8192" in run("pml", "check", schema, "--model", model_folder, code=1).output


def test_check_prints_the_tokens(run: Command, schema: Path, model_folder: Path) -> None:
    shown = run("pml", "check", schema, "--prompt", schema.with_name("rome.pml"), "--model", model_folder).output
    assert "30 positions; 33 tokens of KV" in shown
    assert "28 tokens, 15 from kept KV and 13 computed" in shown


EXAMPLES = Path(__file__).parents[3] / "examples" / "pml"


@pytest.mark.parametrize("name", ["code_generation", "personalization", "travel_plan"])
def test_every_module_hits(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, "reference"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    if name == "code_generation":
        assert "\n7 hits" in out
        assert out.rstrip().endswith("after an edit: 1 of 7 parts encoded")
        return
    found = re.findall(r"^  (\d+) hits, (\d+) misses", out, re.MULTILINE)
    assert len(found) == 2
    assert all(int(hits) >= 5 and misses == "0" for hits, misses in found)


@pytest.mark.parametrize(
    "file",
    ["plan-tokyo", *(pytest.param(name, marks=pytest.mark.full) for name in ("create-main", "describe-learner"))],
)
def test_the_command_answers_and_the_next_run_is_warm(run: Command, file: str, tmp_path: Path) -> None:
    folder, figures = tmp_path / "pml", tmp_path / "run.json"
    shutil.copytree(EXAMPLES, folder)
    options = ["--model", "reference", "--store", tmp_path / "kv", "--max-new-tokens", "4", "--json", figures]
    for encoded in (True, False):
        output = run("pml", "run", folder / f"{file}.pml", *options, "--compare").output
        assert ("0 of " in output.partition("parts encoded")[0]) != encoded
        cached, full = read_rows(figures)
        assert (cached["misses"], cached["recomputed_tokens"]) == (0, 0)
        assert full["recomputed_tokens"] == full["context_tokens"] > 100
        if file == "plan-tokyo":
            names = [chunk["id"].rpartition("/")[2] for chunk in cached["chunks"]]
            assert names == ["#1", "travel-plan", "overseas", "tokyo", "#2"]


@pytest.mark.parametrize("name", ["gone", "../pml/travel", ""])
def test_a_prompt_without_its_schema_is_told_where_it_is_looked_for(run: Command, tmp_path: Path, name: str) -> None:
    prompt = tmp_path / "ask.pml"
    prompt.write_text(f'<prompt schema="{name}">Hello</prompt>')
    assert "--schema" in run("pml", "run", prompt, "--model", "reference", code=1).output
