"""Running methods in alternation, so that what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["in_rounds"]

Method = TypeVar("Method")
Result = TypeVar("Result")


def in_rounds(
    methods: Sequence[Method],
    run: Callable[[Method], Result],
    rounds: int,
    *,
    unmeasured: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Method, list[Result]]:
    """Run every method once a round, each round beginning with another one, so that none always follows the same.

    Parameters
    ----------
    methods : sequence
        What is run.
    run : callable
        Runs a method, and returns what is kept of a measured run.
    rounds : int
        Rounds that are measured.
    unmeasured : int
        Rounds before them, that warm up.
    progress : callable, optional
        Called with the number of finished runs and of all.

    Returns
    -------
    dict
        For each method, in order, what its measured runs returned: one result for each round.
    """
    results: dict[Method, list[Result]] = {method: [] for method in methods}
    total = len(methods) * (rounds + unmeasured)
    done = 0
    for number in range(rounds + unmeasured):
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            result = run(method)
            if number >= unmeasured:
                results[method].append(result)
            done += 1
            if progress is not None:
                progress(done, total)
    return results
