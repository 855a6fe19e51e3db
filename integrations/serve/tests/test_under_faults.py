"""The fault command that asks a server, in short and whole."""

import pytest

from tests.faults import serving
from tests.faults.test_damage import WHOLE
from tests.limits import one_thread as one_thread


@pytest.mark.parametrize(("seconds", "clients"), [(5.0, 6), pytest.param(600.0, 32, marks=WHOLE)])
def test_a_server_answers_right_whoever_comes_and_goes(seconds: float, clients: int) -> None:
    outcome = serving.run(seconds, clients)
    assert outcome.flaws == [], outcome
    assert min(outcome.counts[what] for what in ("right", "puts", "deletes", "left early", "not there")) > 0, outcome
