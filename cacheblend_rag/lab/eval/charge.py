"""Finding the recompute ratio that costs a given charge."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["budget_for_charge"]


def budget_for_charge(charge: float, tokens: int, measure: Callable[[int], float]) -> int | None:
    """Return how many of `tokens` chunk tokens can be recomputed for a charge, or None if not even one can.

    A selector's own work is part of what it charges, and each selector's is different, so the charge is measured. It grows
    with the number of tokens, nearly in proportion, so that a few measurements are enough: a search that goes on between the
    two nearest ones in proportion, or in the middle where that does not get on.

    Parameters
    ----------
    charge : float
        The charge aimed at.
    tokens : int
        Chunk tokens of the prompt, at least 1.
    measure : callable
        Returns the charge of recomputing so many tokens; not falling.

    Returns
    -------
    int or None
        The number whose charge is nearest to `charge`, from 1 to `tokens`; None if the charge of a single token is more than one
        token's work above it.
    """
    token = 1 / tokens
    low, low_charge = 1, measure(1)
    if low_charge >= charge:
        return 1 if low_charge - charge <= token else None
    # A row counts at most 1 in each layer, so this one is no further than the charge aimed at unless the selector is cheaper.
    high = min(tokens, max(2, 1 + round((charge - low_charge) * tokens)))
    high_charge = measure(high) if high > 1 else low_charge
    while high_charge < charge and high < tokens:
        low, low_charge = high, high_charge
        high = min(tokens, max(high + 1, 2 * high))
        high_charge = measure(high)
    halve = False
    while high - low > 1 and min(charge - low_charge, high_charge - charge) > token / 2:
        share = 0.5 if halve else (charge - low_charge) / (high_charge - low_charge)
        middle = min(high - 1, max(low + 1, low + round(share * (high - low))))
        before = high - low
        middle_charge = measure(middle)
        if middle_charge < charge:
            low, low_charge = middle, middle_charge
        else:
            high, high_charge = middle, middle_charge
        halve = high - low > before / 2
    return low if abs(charge - low_charge) <= abs(high_charge - charge) else high
