"""Running methods in alternation, so that what disturbs the machine for a while disturbs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["in_alternation"]

Method = TypeVar("Method")


def in_alternation(
    methods: Sequence[Method],
    rounds: int,
    *,
    unmeasured: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Method, bool]]:
    """Yield every method once a round, each round beginning with another one, so that none always follows the same.

    Parameters
    ----------
    methods : sequence
        What is run.
    rounds : int
        Rounds that are measured.
    unmeasured : int
        Rounds before them, that warm up.
    progress : callable, optional
        Called with the number of finished runs and of all.

    Yields
    ------
    method, bool
        What to run now, and whether it is measured.
    """
    total = len(methods) * (rounds + unmeasured)
    done = 0
    for number in range(rounds + unmeasured):
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            yield method, number >= unmeasured
            done += 1
            if progress is not None:
                progress(done, total)
