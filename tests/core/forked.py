"""Work in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["status_of_child"]


def status_of_child(work: Callable[[], None]) -> int:
    """Run a function in a forked child, for 20 seconds at most, and return how it ended."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]
