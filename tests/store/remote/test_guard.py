"""The circuit breaker."""

import pytest

from cacheblend_rag.errors import RemoteUnavailableError
from cacheblend_rag.store.remote.base import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def is_open(breaker: CircuitBreaker) -> bool:
    try:
        breaker.enter()
    except RemoteUnavailableError:
        return True
    return False


def test_the_wait_doubles_up_to_its_limit() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 5.0, clock)
    for wait_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        breaker.failed(breaker.enter(), "it is down")
        clock.now += wait_s - 0.25
        with pytest.raises(RemoteUnavailableError, match=r"it is down; it is left alone for 0\.2 s more"):
            breaker.enter()
        clock.now += 0.25
    breaker.enter()
    breaker.succeeded()
    breaker.failed(breaker.enter(), "again")
    clock.now += 1.0
    assert not is_open(breaker)


def test_calls_that_fail_together_count_once() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 100.0, clock)
    turns = [breaker.enter() for _ in range(10)]
    for turn in turns:
        breaker.failed(turn, "it is down")
    clock.now += 1.0
    assert not is_open(breaker)


def test_one_call_tries_for_all() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 100.0, clock)
    breaker.failed(breaker.enter(), "it is down")
    clock.now += 1.0
    breaker.enter()
    assert is_open(breaker)
    breaker.succeeded()
    assert not is_open(breaker)


def test_a_trial_that_never_ends_is_replaced() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 100.0, clock)
    breaker.failed(breaker.enter(), "it is down")
    clock.now += 1.0
    lost = breaker.enter()
    clock.now += 1.0
    turn = breaker.enter()
    breaker.failed(turn, "still down")
    breaker.failed(lost, "long ago")
    clock.now += 2.0
    assert not is_open(breaker)


def test_an_answer_ends_the_wait_whenever_it_was_asked_for() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, 100.0, clock)
    breaker.failed(breaker.enter(), "it is down")
    clock.now += 1.0
    breaker.enter()
    clock.now += 1.0
    late = breaker.enter()
    breaker.succeeded()
    assert not is_open(breaker)
    # What was asked before that and never answered is about the past.
    breaker.failed(late, "still down")
    assert not is_open(breaker)
    breaker.failed(breaker.enter(), "down again")
    assert is_open(breaker)
