"""Picking rows by score: against a naive count, over drawn layouts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import AttentionCall, attention_weights
from cacheblend_rag.selection import BoundarySelector, SelectionTask
from cacheblend_rag.selection.question import QuerySelector
from cacheblend_rag.selection.segments import pick, segment_numbers


@st.composite
def layouts(draw: st.DrawFn) -> PromptLayout:
    spans, at = [], draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 30))
        spans.append(ChunkSpan(at, at + length, at))
        at += length + draw(st.integers(0, 3))
    return PromptLayout(tuple(range(at + 2)), tuple(range(at + 2)), tuple(spans), draw(st.integers(0, 1)))


@given(layouts(), st.integers(1, 12))
def test_segments_never_leave_a_chunk_and_are_of_like_length(layout: PromptLayout, most: int) -> None:
    rows = layout.context_rows
    numbers = segment_numbers(layout, rows, most)
    counts = torch.bincount(numbers)
    assert counts.max() <= most and int((counts == 0).sum()) == 0
    for span in layout.chunks:
        inside = (rows >= span.start) & (rows < span.stop)
        own = numbers[inside]
        assert not torch.isin(numbers[~inside], own).any()
        lengths = torch.bincount(own - own[0])
        assert lengths.max() - lengths.min() <= 1 and lengths.numel() == -(-len(span) // most)


@given(layouts(), st.integers(1, 12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_whole_segments_are_picked_by_their_mean_score(layout: PromptLayout, most: int, budget: int, draw) -> None:
    rows = layout.context_rows
    scores = torch.tensor([draw.random() for _ in rows])
    picked = pick(scores, rows, budget, layout, most).tolist()
    members: dict[int, list[int]] = {}
    for index, number in enumerate(segment_numbers(layout, rows, most).tolist()):
        members.setdefault(number, []).append(index)
    wanted: list[int] = []
    for indices in sorted(members.values(), key=lambda each: -sum(float(scores[i]) for i in each) / len(each)):
        best = sorted(indices, key=lambda i: -float(scores[i]))
        wanted += best[: max(0, budget - len(wanted))]
    assert picked == sorted(int(rows[index]) for index in wanted)


@given(layouts(), st.floats(0, 1), st.sampled_from(["first", "both"]))
def test_boundary_takes_what_is_nearest_to_a_border(layout: PromptLayout, ratio: float, ends: str) -> None:
    budget = round(ratio * layout.context_rows.numel())
    selector = BoundarySelector(ends=ends)  # type: ignore[arg-type]
    rows = selector.begin(SelectionTask(layout, 4, budget)).rows().tolist()
    assert rows == sorted(set(rows)) and len(rows) == budget
    assert set(rows) <= set(layout.context_rows.tolist())

    def distance(row: int) -> int:
        span = next(span for span in layout.chunks if span.start <= row < span.stop)
        return row - span.start if ends == "first" else min(2 * (row - span.start), 2 * (span.stop - 1 - row) + 1)

    left = [distance(row) for row in layout.context_rows.tolist() if row not in rows]
    assert not rows or not left or max(map(distance, rows)) <= min(left)


@given(layouts(), st.integers(0, 40), st.sampled_from([None, 2]), st.integers(1, 12), st.integers(0, 999))
def test_questions_weigh_naively(layout: PromptLayout, budget: int, stop: int | None, most: int, seed: int) -> None:
    rows = layout.context_rows
    budget = min(budget, rows.numel())
    attention = torch.rand(rows.numel(), generator=torch.Generator().manual_seed(seed)) + 0.01
    numbers = segment_numbers(layout, rows, most).tolist()
    members = [[score for score, other in zip(attention.tolist(), numbers, strict=True) if other == n] for n in numbers]
    means = [sum(each) / len(each) for each in members]
    selector = QuerySelector(segment_tokens=most, stop_layer=stop, look_layers=(0,))
    look = selector.begin(SelectionTask(layout, 4, budget))
    look.look(0, attention[None])
    picked = look.rows().tolist()
    assert len(picked) == min(round(budget * 4 / (stop or 3)), rows.numel())
    # Whole segments by their mean: none that was left out altogether beats one that was taken.
    taken = {number for number, row in zip(numbers, rows.tolist(), strict=True) if row in picked}
    inside = [mean for mean, number in zip(means, numbers, strict=True) if number in taken]
    outside = [mean for mean, number in zip(means, numbers, strict=True) if number not in taken]
    assert not inside or not outside or min(inside) >= max(outside) * (1 - 1e-5)


def test_weights_are_those_of_a_softmax_for_grouped_heads() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 3, 8, generator=draw), torch.randn(1, 2, 9, 8, generator=draw)
    scores = torch.einsum("hqd,hkd->hqk", query[0], key[0].repeat_interleave(2, dim=0)) * 0.3
    # Without a mask the last rows are the last tokens: each sees what stands before it, and itself.
    later = torch.arange(9)[None, :] > torch.arange(6, 9)[:, None]
    wanted = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    for window in (1, 3):
        got = attention_weights(AttentionCall(query, key, None, 0.3), window)
        assert (got - wanted[:, -window:]).abs().max() < 1e-6
    seen = torch.rand(1, 1, 3, 9, generator=draw) < 0.7
    seen[..., 0] = True
    masked = scores.masked_fill(~seen[0], -torch.inf).softmax(dim=-1)
    assert (attention_weights(AttentionCall(query, key, seen, 0.3), 3) - masked).abs().max() < 1e-6


def test_half_precision_does_not_overflow_where_the_kernel_does_not() -> None:
    query = torch.full((1, 1, 1, 128), 24.0, dtype=torch.float16)
    key = torch.full((1, 1, 3, 128), 24.0, dtype=torch.float16)
    weights = attention_weights(AttentionCall(query, key, None, 128**-0.5), 1)
    assert (weights - 1 / 3).abs().max() < 1e-3
