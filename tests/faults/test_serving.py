"""The server under many hands: the command in short, and whole."""

from __future__ import annotations

import pytest

from tests.faults.serving import run


@pytest.mark.parametrize(
    ("seconds", "clients"),
    [(9.0, 6), pytest.param(600.0, 32, marks=[pytest.mark.full, pytest.mark.timeout(1200)])],
    ids=["sampled", "all"],
)
def test_every_answer_is_right_whoever_comes_and_goes(seconds: float, clients: int) -> None:
    outcome = run(seconds, clients)
    assert outcome.flaws == [], outcome
    assert min(outcome.counts[what] for what in ("right", "puts", "deletes", "left early", "not there")) > 0, outcome
