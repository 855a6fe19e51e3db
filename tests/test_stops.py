"""A text is cut before the stop string that begins first, in whatever pieces it comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.stops import StopCutter, cut_at_stop


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one. two", [], "one. two"),
        ("one. two", ["never"], "one. two"),
        ("one. two", ["two", "."], "one"),
        # "bc" is complete first, "abcd" begins first.
        ("-abcd", ["bc", "abcd"], "-"),
        ("-abce", ["bc", "abcd"], "-a"),
        ("-abc", ["bc", "abcd"], "-a"),
        (".", ["."], ""),
    ],
)
def test_the_stop_string_that_begins_first_counts(text: str, stops: list[str], wanted: str) -> None:
    assert cut_at_stop(text, stops) == wanted
    cutter = StopCutter(stops)
    assert "".join(map(cutter.feed, text)) + cutter.flush() == wanted


@given(st.text("abn", max_size=30), st.lists(st.text("abn", min_size=1, max_size=5), max_size=3), st.data())
def test_cutting_pieces_equals_cutting_the_text(text: str, stops: list[str], data: st.DataObject) -> None:
    wanted = cut_at_stop(text, stops)
    assert all(stop not in wanted for stop in stops)
    cutter, shown, rest = StopCutter(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += cutter.feed(rest[:size])
        rest = rest[size:]
        read = text[: len(text) - len(rest)]
        assert wanted.startswith(shown)
        # Nothing is held back for longer than a stop string may need.
        longest = max(map(len, stops), default=1)
        assert len(shown) >= min(len(wanted), len(read) - 2 * longest)
    assert shown + cutter.flush() == wanted


def test_what_cannot_be_a_stop_string_is_shown_at_once() -> None:
    cutter = StopCutter(["\n\n", "User:"])
    pieces = ("He said:", " Us", "ed\n", "end\n", "\nmore")
    assert [cutter.feed(piece) for piece in pieces] == ["He said:", " ", "Used", "\nend", ""]
    assert cutter.flush() == ""
