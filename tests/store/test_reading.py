"""Documents of many chunks are read in time and memory that grow with their text."""

import time
import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.companions import Companions
from cacheblend_rag.reading import Member, Place, end_before
from cacheblend_rag.store import NodeRecord
from tests.store.kit import key_of, open_store


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=30),
    st.integers(0, 40),
    st.booleans(),
)
def test_what_stands_before_a_chunk_is_read_as_one_after_the_other(
    sizes: list[tuple[int, int]], most: int, separated: bool
) -> None:
    separator = (7,) if separated else ()
    members, start = [], 0
    for number, (size, step) in enumerate(sizes):
        ids = tuple(range(100 * number, 100 * number + size))
        members.append(Member(str(number), ids, Place("d", start, size, tuple(range(1, size + 1)))))
        start += step
    for number in range(len(members)):
        whole: tuple[int, ...] = ()
        for one, two in reversed([*pairwise(members[: number + 1])]):
            shared = max(0, one.place.start + one.place.length - two.place.start)  # type: ignore[operator]
            left = one.token_ids[: max(0, one.place.length - shared)] if shared else one.token_ids
            whole = left + (separator if whole and not shared else ()) + whole
        found = end_before(members, number, most, separator)
        assert found.token_ids == whole[max(0, len(whole) - most) :]
        assert {token // 100 for token in found.token_ids if token != 7} <= set(map(int, found.ids)) | {0}


def test_companions_of_many_chunks_take_time_and_memory_of_the_text_alone() -> None:
    store, count = open_store(None, 0), 4000
    records = [
        NodeRecord(f"n{number}", key_of(number), "h", (number, 1, 2, 3), (), Place("d", 4 * number, 4, ()))
        for number in range(count)
    ]
    chooser = Companions("own", "ns", (), None, lambda text: (1, 2), lambda: store.names)
    tracemalloc.start()
    begun = time.thread_time()
    _, documents = store.names.rehearse("ns", records, 60.0)
    chosen = chooser.choose([(record, documents["d"]) for record in records])
    taken = time.thread_time() - begun
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Tracing makes it slow.
    assert peak_bytes < 40_000_000 and taken < 10.0
    assert all(later.behind and later.seen for later in chosen)
