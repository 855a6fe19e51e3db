"""What values of the lab's options mean."""

from __future__ import annotations

import math

from cacheblend_rag.errors import ConfigError

__all__ = ["parse_counts", "parse_names", "parse_numbers"]


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; one that is empty is among them, to be refused as any other unknown one."""
    return tuple(name.strip() for name in text.split(","))


def parse_numbers(text: str) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{text!r} holds something that is not a number; write numbers like 0,0.15") from error
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{text!r} holds a number that is not finite; write numbers like 0,0.15")
    return numbers


def parse_counts(text: str, example: str = "10000,100000") -> tuple[int, ...]:
    """Return whole numbers written like the example."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        wrong = next(part.strip() for part in text.split(",") if not part.strip().isdecimal())
        raise ConfigError(f"{wrong!r} in {text!r} is not a whole number; write numbers like {example}") from None
