"""Times, progress and the JSON file."""

import io
import json
import math
from contextlib import redirect_stderr
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.cli import output


def test_times_are_said() -> None:
    times = {0.0123: "12.3 ms", 0.9999: "1 s", 125: "2 min 05 s", 7260: "2 h 01 min"}
    assert [output.say_seconds(number) for number in times] == list(times.values())


def test_rows_are_made_alike(tmp_path: Path) -> None:
    output.write_json(tmp_path / "x.json", "test", [{"a": 1}, {"b": 2.5}], model="m")
    whole = json.loads((tmp_path / "x.json").read_text())
    assert whole["rows"] == [{"a": 1, "b": None}, {"a": None, "b": 2.5}]
    assert (whole["command"], whole["model"]) == ("test", "m")
    assert whole["versions"]["cacheblend-rag"]
    with pytest.raises(ValueError, match="JSON"):
        output.write_json(tmp_path / "x.json", "test", [{"a": math.nan}])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20))))
def test_lines_of_progress_only_go_up(told: list[tuple[int, int]]) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown), output.progress_bar("looking") as progress:
        for done, total in told:
            progress(done, total)
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert len(lines) >= bool(told)
    assert all(int(line[1]) < int(later[1]) for line, later in pairwise(lines))
    # Between the first line and the next five seconds there are only those that say that all is done.
    assert all(int(line[1]) >= int(line[3]) for line in lines[1:])
