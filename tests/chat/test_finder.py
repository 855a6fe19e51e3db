"""The finder, against the naive way of looking for every text at every place."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.chat.catalog import HEAD_CHARS, ChunkFinder
from cacheblend_rag.chunk import text_hash

# Few letters, so that texts overlap, nest and repeat; some from beyond the basic plane, since positions count characters.
LETTERS = "ab \n🙂é"


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
    for id, text in [*known.items(), *replaced.items()]:
        finder.add(id, text_hash(text), text)
    finder.remove(removed)
    live = {id: text for id, text in (known | replaced).items() if id not in removed and len(text) >= HEAD_CHARS}
    assert finder.entries.keys() == known.keys() - removed
    matches = finder.find(prompt, least)
    for match in matches:
        text = prompt[match.start : match.stop]
        assert len(text) >= least
        assert set(match.ids) == {id for id, each in live.items() if each == text} != set()
    assert all(a.stop <= b.start for a, b in pairwise(matches))
    for start in range(len(prompt)):
        for text in live.values():
            if len(text) >= least and prompt.startswith(text, start):
                over = [each for each in matches if each.start < start + len(text) and start < each.stop]
                assert max((each.stop - each.start for each in over), default=0) >= len(text)
