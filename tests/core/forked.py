"""Work in a forked child."""

import os
import resource
import signal
from collections.abc import Callable

__all__ = ["end_of_child", "status_of_child"]


def status_of_child(work: Callable[[], None]) -> int:
    """Run a function in a forked child, for 20 seconds at most, and return how it ended."""
    return end_of_child(work)[0]


def end_of_child(work: Callable[[], None]) -> tuple[int, resource.struct_rusage]:
    """Do what `status_of_child` does; return also what the child took."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.wait4(child, 0)[1:]
