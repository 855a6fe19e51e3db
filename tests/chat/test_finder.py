"""The finder, against the naive way of looking for every text at every place."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.chat.finder import HEAD_CHARS, ChunkFinder
from cacheblend_rag.chunk import text_hash

# Few letters, so that texts overlap, nest and repeat; some from beyond the basic plane, since positions count characters.
LETTERS = "ab \n🙂é"


def naive_cover(prompt: str, texts: set[str]) -> tuple[int, int]:
    """The most characters that texts without overlap can cover, and minus the fewest texts that do."""
    best = [(0, 0)] * (len(prompt) + 1)
    for end in range(1, len(prompt) + 1):
        before = [(best[end - len(text)], len(text)) for text in texts if prompt.endswith(text, 0, end)]
        best[end] = max([best[end - 1], *((covered + size, count - 1) for (covered, count), size in before)])
    return best[-1]


@settings(max_examples=300)
@given(data=st.data(), least=st.integers(HEAD_CHARS, 22))
def test_finds_all_that_can_be_found_and_nothing_else(data: st.DataObject, least: int) -> None:
    bases = data.draw(st.lists(st.text(LETTERS, max_size=30), min_size=1, max_size=6, unique=True))
    # Prefixes of each other, repeated texts, and texts that are too short to be looked for.
    texts = [*bases, bases[0] * 3, bases[0] * 3 + "a", bases[-1][1:], bases[-1]]
    known = {f"n{number}": text for number, text in enumerate(texts)}
    replaced = data.draw(
        st.dictionaries(st.sampled_from(sorted(known)), st.text(LETTERS, min_size=HEAD_CHARS, max_size=40), max_size=3)
    )
    removed = data.draw(st.sets(st.sampled_from(sorted(known)), max_size=3))
    parts = data.draw(
        st.lists(st.sampled_from([*texts, *replaced.values()]) | st.text(LETTERS, max_size=12), max_size=8)
    )
    prompt = "".join(parts)
    if prompt and data.draw(st.booleans()):
        # One changed character is another text.
        place = data.draw(st.integers(0, len(prompt) - 1))
        prompt = prompt[:place] + data.draw(st.sampled_from(["", *LETTERS])) + prompt[place + 1 :]

    finder = ChunkFinder()
    finder.add(known.items())
    finder.add(replaced.items())
    finder.remove(removed)
    live = {id: text for id, text in (known | replaced).items() if id not in removed and len(text) >= HEAD_CHARS}
    assert finder.ids() == live.keys()
    matches = finder.find(prompt, least)
    for match in matches:
        text = prompt[match.start : match.stop]
        assert len(text) >= least and match.digest == text_hash(text)
        assert set(match.ids) == {id for id, each in live.items() if each == text} != set()
    assert all(a.stop <= b.start for a, b in pairwise(matches))
    covered = sum(match.stop - match.start for match in matches)
    assert (covered, -len(matches)) == naive_cover(prompt, {text for text in live.values() if len(text) >= least})


def test_nothing_is_found_where_nothing_is_known() -> None:
    finder = ChunkFinder()
    assert finder.find("x" * 40) == []
    finder.add([("n", "y" * HEAD_CHARS)])
    assert finder.find("y") == []


@pytest.mark.parametrize("heading", ["", "# The same heading over every chunk\n\n"])
@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_all_are_found_among_many_texts(count: int, heading: str) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 5 + 2))[:length]

    texts = {f"n{number}": heading + text(rng.randint(200, 1500)) for number in range(count)}
    finder = ChunkFinder()
    finder.add(texts.items())
    for _ in range(50):
        ids = [f"n{rng.randrange(count)}" for _ in range(rng.randint(0, 16))]
        parts = [part for id in ids for part in (text(200), texts[id])]
        prompt = (heading * 3).join([*parts, text(max(0, 36_000 - sum(map(len, parts))))])
        assert [match.ids[0] for match in finder.find(prompt)] == ids
