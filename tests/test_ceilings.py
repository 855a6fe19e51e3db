"""No folder grows over its ceiling, and no ceiling hangs far above what is below it."""

from pathlib import Path

import pytest

from .ceilings import LINES, complaints, size, sizes, unlisted


def test_nothing_is_over_its_ceiling() -> None:
    said = complaints(sizes(), LINES)
    assert not said, "\n".join(said)
    assert not unlisted(), "a folder without a ceiling: add it to LINES in tests/ceilings.py"


def test_a_line_too_many_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("a = 1\nb = 2\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("c = 3", encoding="utf-8")
    (tmp_path / "page.html").write_text("<p>\n", encoding="utf-8")
    assert size(tmp_path) == (3, 2)
    assert complaints({"a": (3, 2)}, {"a": (3, 2)}) == []
    assert complaints({"a": (4, 2)}, {"a": (3, 2)}) == [
        "a: 4 lines in 2 files are over its ceiling of 3 in 2; take others out"
    ]


@pytest.mark.parametrize("ceiling", [(500, 2), (3, 3)])
def test_a_ceiling_that_is_too_high_is_found(ceiling: tuple[int, int]) -> None:
    assert complaints({"a": (3, 2)}, {"a": ceiling}) == [
        f"a: lower its ceiling of {ceiling[0]} lines in {ceiling[1]} files to 3 in 2"
    ]
