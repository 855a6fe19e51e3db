"""Sizes, times, lists and the JSON file."""

import io
import itertools
import json
import math
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.cli import output
from cacheblend_rag.errors import ConfigError
from tests.limits import wait_until


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("800000", 8e5), ("12B", 12), ("500MB", 5e8), ("1.5 GiB", 3 * 2**29), ("2g", 2e9), ("64KiB", 2**16)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert output.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1GB", "1e9", "nan", "two", "1 PB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        output.parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (16_384, "16.4 KB"), (2.5e9, "2.5 GB"), (3e15, "3e+03 TB")],
)
def test_sizes_are_said(size: float, text: str) -> None:
    assert output.say_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (0.9999, "1 s"), (3.21, "3.21 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")],
)
def test_times_are_said(seconds: float, text: str) -> None:
    assert output.say_seconds(seconds) == text


def test_rows_are_made_alike(tmp_path: Path) -> None:
    output.write_json(tmp_path / "x.json", "test", [{"a": 1}, {"b": 2.5}], model="m")
    whole = json.loads((tmp_path / "x.json").read_text())
    assert whole["rows"] == [{"a": 1, "b": None}, {"a": None, "b": 2.5}]
    assert whole["command"] == "test"
    assert whole["model"] == "m"
    assert whole["versions"]["cacheblend-rag"]


def test_a_figure_that_is_none_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        output.write_json(tmp_path / "x.json", "test", [{"a": math.nan}])


def test_standard_output_holds_the_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with output.json_alone():
        print("said besides")
        output.write_json(Path("-"), "test", [{"a": 1}])
    print("as before")
    shown, beside = capsys.readouterr()
    assert json.loads(shown.removesuffix("as before\n"))["rows"] == [{"a": 1}]
    assert beside == "said besides\n"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20))))
def test_lines_of_progress_only_go_up(told: list[tuple[int, int]]) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown), output.json_alone(), output.progress_bar("looking") as progress:
        for done, total in told:
            progress(done, total)
    lines = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert len(lines) >= bool(told)
    assert all(line["done"] <= line["total"] for line in lines)
    assert all(line["done"] < later["done"] for line, later in itertools.pairwise(lines))
    # Between the first line and the next five seconds there are only those that say that all is done.
    assert all(line["done"] == line["total"] for line in lines[1:])


def test_a_line_comes_while_nothing_gets_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.cli.output._LINE_S", 0.01)
    shown = io.StringIO()
    with redirect_stderr(shown), output.progress_bar("looking") as progress:
        progress(1, 2)
        wait_until(lambda: shown.getvalue().count("\n") >= 3)
    assert all(line.startswith("looking: 1 of 2 after ") for line in shown.getvalue().splitlines())
