"""What of its document a chunk is read behind."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.reading import Member, Place, end_before


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
