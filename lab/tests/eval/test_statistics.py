"""The bootstrap against the same resampling done one question at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.eval import Bootstrap
from cacheblend_rag.errors import ConfigError


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 1)), min_size=1, max_size=40), st.integers(0, 5))
def test_an_interval_is_that_of_resampled_contexts(questions: list[tuple[int, float]], seed: int) -> None:
    bootstrap = Bootstrap(resamples=60, seed=seed)
    found = bootstrap.interval([value for _, value in questions], [context for context, _ in questions])
    contexts = sorted({context for context, _ in questions})
    means = []
    for draw in bootstrap.weights(len(contexts)):
        assert draw.sum() == len(contexts)
        drawn: list[float] = []
        for context, times in zip(contexts, draw, strict=True):
            for _ in range(int(times)):
                drawn += [value for own, value in questions if own == context]
        means.append(sum(drawn) / len(drawn))
    low, high = np.percentile(means, (2.5, 97.5))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    assert found.mean == pytest.approx(sum(value for _, value in questions) / len(questions), abs=1e-9)


def test_where_questions_are_alone_the_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(1).random(400)
    found = Bootstrap(resamples=4000).interval(values.tolist(), range(400))
    half = 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)


def test_questions_of_one_context_are_not_independent() -> None:
    values = [float(number // 10 % 2) for number in range(200)]
    alone = Bootstrap().interval(values, range(200))
    together = Bootstrap().interval(values, [number // 10 for number in range(200)])
    assert together.high - together.low > 2 * (alone.high - alone.low)


def test_no_resamples_are_refused() -> None:
    with pytest.raises(ConfigError, match="resamples=0"):
        Bootstrap(resamples=0)


def test_a_share_is_that_of_the_sums() -> None:
    share = Bootstrap(500, 1).share([1.0, 3.0, 2.0], [2.0, 4.0, 2.0], [0, 0, 1])
    assert share.mean == 6 / 8
    # Of two contexts either one is drawn twice, or both.
    assert (share.low, share.high) == (4 / 6, 1.0)
