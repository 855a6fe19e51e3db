"""The finder, against the naive way of looking for every text at every place."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.chat.finder import HEAD_CHARS, ChunkFinder
from cacheblend_rag.chunk import text_hash

# Few letters, so that texts overlap, nest and repeat; some from beyond the basic plane, since positions count characters.
TEXTS = st.text("ab \n🙂é", min_size=HEAD_CHARS, max_size=40)


def finder_of(texts: dict[str, str]) -> ChunkFinder:
    finder = ChunkFinder()
    finder.add(texts.items())
    return finder


def naive_cover(prompt: str, texts: set[str]) -> int:
    """The most characters that texts without overlap can cover."""
    best = [0] * (len(prompt) + 1)
    for end in range(1, len(prompt) + 1):
        covers = [best[end - len(text)] + len(text) for text in texts if prompt.endswith(text, 0, end)]
        best[end] = max([best[end - 1], *covers])
    return best[-1]


@settings(max_examples=150)
@given(data=st.data())
def test_finds_as_much_as_can_be_found(data: st.DataObject) -> None:
    texts = data.draw(st.lists(TEXTS, min_size=1, max_size=6, unique=True))
    parts = data.draw(st.lists(st.one_of(st.sampled_from(texts), st.text("ab \n", max_size=12)), max_size=8))
    prompt = "".join(parts)
    known = {f"n{number}": text for number, text in enumerate(texts)}
    matches = finder_of(known).find(prompt)
    for match in matches:
        assert prompt[match.start : match.stop] == known[match.ids[0]]
        assert match.digest == text_hash(known[match.ids[0]])
    assert all(a.stop <= b.start for a, b in pairwise(matches))
    assert sum(match.stop - match.start for match in matches) == naive_cover(prompt, set(texts))


@settings(max_examples=150)
@given(
    texts=st.lists(st.text("ab\n🙂", max_size=24), min_size=1, max_size=8),
    prompt=st.text("ab\n🙂", max_size=80),
    least=st.integers(HEAD_CHARS, 22),
)
def test_everything_that_str_find_finds_and_nothing_else(texts: list[str], prompt: str, least: int) -> None:
    # Prefixes of each other, repeated texts, and texts that are too short to be looked for.
    texts = [*texts, texts[0] * 3, texts[0] * 3 + "a", texts[-1]]
    prompt += texts[-2] + prompt + texts[0] * 4
    known = {f"n{number}": text for number, text in enumerate(texts)}
    matches = finder_of(known).find(prompt, least)
    for match in matches:
        assert prompt.find(known[match.ids[0]], match.start) == match.start
        assert len(known[match.ids[0]]) == match.stop - match.start >= least
    wanted = {text for text in texts if len(text) >= least}
    assert sum(match.stop - match.start for match in matches) == naive_cover(prompt, wanted)


def test_thousands_of_texts_with_one_heading_in_a_prompt_full_of_it() -> None:
    heading = "# The same heading\n"
    texts = {f"n{number}": heading + "lorem ipsum " * 3 + "x" * number + f" {number}" for number in range(3000)}
    finder = finder_of(texts)
    prompt = (heading * 50).join(texts[f"n{number}"] for number in (7, 2999, 7, 0))
    assert [match.ids[0] for match in finder.find(prompt)] == ["n7", "n2999", "n7", "n0"]
    finder.remove(["n7"])
    assert [match.ids[0] for match in finder.find(prompt)] == ["n2999", "n0"]


@settings(max_examples=100)
@given(text=TEXTS, data=st.data())
def test_one_changed_character_is_another_text(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(sorted(set("ab \n🙂é") - {text[place]})))
    edited = data.draw(st.sampled_from([text[:place] + other + text[place + 1 :], text[:place] + text[place + 1 :]]))
    found = finder_of({"n": text}).find(edited)
    assert bool(found) == (text in edited)


@settings(max_examples=60)
@given(
    first=st.dictionaries(st.sampled_from("uvwxyz"), TEXTS),
    second=st.dictionaries(st.sampled_from("uvwxyz"), TEXTS),
    data=st.data(),
)
def test_added_replaced_and_removed_texts(first: dict[str, str], second: dict[str, str], data: st.DataObject) -> None:
    finder = finder_of(first)
    finder.add(second.items())
    removed = data.draw(st.sets(st.sampled_from("uvwxyz")))
    finder.remove(removed)
    live = {id: text for id, text in (first | second).items() if id not in removed}
    assert finder.ids() == live.keys()
    for text in {*first.values(), *second.values()}:
        found = finder.find(text)
        assert sum(match.stop - match.start for match in found) == naive_cover(text, set(live.values()))


def test_short_texts_are_left_to_the_prompt() -> None:
    finder = finder_of({"short": "x" * (HEAD_CHARS - 1), "long": "y" * HEAD_CHARS})
    assert finder.ids() == {"long"}
    prompt = "x" * HEAD_CHARS + "y" * HEAD_CHARS
    assert [match.ids[0] for match in finder.find(prompt)] == ["long"]
    assert finder.find(prompt, min_chars=HEAD_CHARS + 1) == []
    assert finder.find("y") == ChunkFinder().find(prompt) == []


@pytest.mark.parametrize("heading", ["", "# The same heading over every chunk\n\n"])
@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_all_are_found_among_many_texts(count: int, heading: str) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 5 + 2))[:length]

    texts = {f"n{number}": heading + text(rng.randint(200, 1500)) for number in range(count)}
    finder = finder_of(texts)
    for _ in range(100):
        ids = [f"n{rng.randrange(count)}" for _ in range(rng.randint(0, 16))]
        parts = [part for id in ids for part in (text(200), texts[id])]
        prompt = "\n\n".join([*parts, text(max(0, 36_000 - sum(map(len, parts))))])
        assert [match.ids[0] for match in finder.find(prompt)] == ids
