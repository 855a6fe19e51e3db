"""Documents of many chunks are read in time and memory that grow with their text."""

import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.keys import chunk_key, context_digest
from cacheblend_rag.reading import Member, Place, ReadingRules, contexts, overlap
from cacheblend_rag.store import NodeRecord
from tests.store.kit import key_of, open_store


def place(text: str) -> Place:
    return Place("d", None, None, len(text), text, ())


@given(st.text("ab ", max_size=60), st.text("ab ", max_size=60), st.text("ab ", max_size=40))
def test_an_overlap_is_the_longest_there_is(before: str, after: str, shared: str) -> None:
    one, two = before + shared, shared + after
    sizes = [size for size in range(16, min(len(one), len(two)) + 1) if one[len(one) - size :] == two[:size]]
    assert overlap(place(one), place(two)) == max(sizes, default=0)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=30),
    st.none() | st.integers(0, 30),
    st.booleans(),
)
def test_contexts_are_read_as_one_after_the_other(
    sizes: list[tuple[int, int]], limit: int | None, separated: bool
) -> None:
    rules = ReadingRules(limit, (7,) if separated else ())
    members, start = [], 0
    for number, (size, step) in enumerate(sizes):
        ids = tuple(range(100 * number, 100 * number + size))
        members.append(Member(str(number), ids, Place("d", start, None, size, "", tuple(range(1, size + 1)))))
        start += step
    pieces = []
    for one, two in pairwise(members):
        shared = max(0, one.place.start + one.place.length - two.place.start)  # type: ignore[operator]
        pieces.append(one.token_ids[: one.place.length - shared] if shared else one.token_ids + rules.separator)
    first, context, naive = 0, (), []
    for number, member in enumerate(members):
        context += pieces[number - 1] if number else ()
        size = len(member.token_ids) + len(rules.separator)
        if limit is not None and len(context) + size > limit:
            while first < number and len(context) > min(limit // 4, limit - size):
                context = context[len(pieces[first]) :]
                first += 1
        naive.append((first, context))
    assert [(each.first, each.token_ids) for each in contexts(members, rules)] == naive


@pytest.mark.parametrize("limit", [None, 8192])
def test_the_keys_of_many_chunks_take_time_and_memory_of_the_text_alone(limit: int | None) -> None:
    store, count = open_store(None, 0), 4000
    records = [
        NodeRecord(f"n{number}", key_of(number), "h", (number, 1, 2, 3), (), Place("d", 4 * number, None, 4, "", ()))
        for number in range(count)
    ]
    tracemalloc.start()
    begun = time.thread_time()
    targets = store.names.rehearse("ns", records, ReadingRules(limit), 60.0)
    taken = time.thread_time() - begun
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Each context on its own would be up to 128 kB, and 250 MB together; tracing makes it slow.
    assert peak_bytes < 20_000_000 and taken < 3.0
    assert [target.context for target in targets[:3]] == [(), (0, 1, 2, 3), (0, 1, 2, 3, 1, 1, 2, 3)]
    last = targets[-1].context
    assert len(last) == (4 * (count - 1) if limit is None else len(last)) and last[-4:] == (count - 2, 1, 2, 3)
    assert targets[-1].record.key == chunk_key("ns", records[-1].token_ids, None, context_digest(last))


def test_overlaps_of_long_texts_take_no_time() -> None:
    begun = time.thread_time()
    assert overlap(place("a" * 199_999 + "c"), place("a" * 200_000)) == 0
    assert overlap(place("x" + "a" * 200_000), place("a" * 200_000 + "b")) == 200_000
    assert time.thread_time() - begun < 1.0
