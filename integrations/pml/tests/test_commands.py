"""``cacheblend-rag pml check`` and ``pml show``."""

import xml.etree.ElementTree as ElementTree
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


def test_check_says_what_a_schema_has(run: Command, schema: Path, model_folder: Path) -> None:
    prompt = schema.with_name("rome.pml")
    assert run("pml", "check", schema).output == "trip: a valid schema with 3 modules, 1 union, 1 parameter\n"
    lines = run("pml", "check", schema, "--prompt", prompt, "--model", model_folder).output.splitlines()
    assert lines == [
        "trip: a valid schema with 3 modules, 1 union, 1 parameter, 30 positions",
        "rome.pml: a prompt with 2 imports, 28 tokens, 15 of them from kept KV",
    ]


def test_check_says_what_is_wrong_and_where(run: Command, schema: Path, model_folder: Path) -> None:
    schema.write_text(SCHEMA.replace("</union>", ""), encoding="utf-8")
    done = run("pml", "check", schema, code=1)
    assert "error: trip.pml, line 4, column 3: expected </union>, which closes the element at line 3" in done.output
    schema.write_text(SCHEMA, encoding="utf-8")
    prompt = schema.with_name("rome.pml")
    prompt.write_text(PROMPT.replace("a week", "fourteen days"), encoding="utf-8")
    assert (
        "13 tokens, 4 more than the 9"
        in run("pml", "check", schema, "--prompt", prompt, "--model", model_folder, code=1).output
    )
    schema.write_text(f'<schema name="trip">{"x" * 9000}</schema>', encoding="utf-8")
    assert "the model's window is 8192" in run("pml", "check", schema, "--model", model_folder, code=1).output


def test_show_prints_and_draws_the_layout(run: Command, schema: Path, model_folder: Path, tmp_path: Path) -> None:
    figures, drawing = tmp_path / "figures.json", tmp_path / "layout.svg"
    shown = run("pml", "show", schema, "--model", model_folder, "--svg", drawing, "--json", figures).output
    rows = {row["name"]: row for row in read_rows(figures)}
    assert (rows["plan"]["start"], rows["plan"]["stop"], rows["plan"]["slots"]) == (1, 21, [[10, 19]])
    assert rows["rome"]["start"] == rows["oslo"]["start"] == 21
    # Two heads of eight numbers, key and value, four layers, four bytes each.
    assert rows["oslo"]["cached_bytes"] == 9 * 2 * 8 * 2 * 4 * 4
    assert "30 positions; 33 tokens of KV" in shown and "21-29" in shown
    root = ElementTree.parse(drawing).getroot()
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == [
        "plan: module, positions 1 to 20, 20 tokens",
        "rome: member, positions 21 to 24, 4 tokens",
        "oslo: member, positions 21 to 29, 9 tokens",
    ]
    width = float(root.attrib["width"])
    bars = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert all(float(bar.get("x", 0)) + float(bar.attrib["width"]) <= width for bar in bars)


def test_show_prints_a_prompt(run: Command, schema: Path, model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--prompt", schema.with_name("rome.pml"), "--model", model_folder, "--json", figures)
    assert "28 tokens, 15 from kept KV and 13 computed" in run("pml", "show", schema, *arguments).output
    segments = [(row["name"], row["start"], row["stop"]) for row in read_rows(figures) if row["of"] == "rome.pml"]
    assert segments == [
        ("BOS", 0, 1),
        ("plan", 1, 10),
        ("plan days", 10, 16),
        ("plan", 19, 21),
        ("rome", 21, 25),
        ("new text", 25, 31),
    ]
