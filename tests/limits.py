"""Bounds on what one call, and the tests of a folder, may take."""

import gc
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


@contextmanager
def within(nbytes: int, seconds: float) -> Iterator[None]:
    """Have every allocation beyond `nbytes` more than there is now fail, and see that the block computes no longer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    # A collection in the block goes through its own objects, not through all that earlier tests have left.
    gc.freeze()
    begun = time.thread_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        gc.unfreeze()
    # Of this thread, since other processes may keep it waiting.
    assert time.thread_time() - begun < seconds


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: for models as tiny as these, sharing the work costs more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wait_until(is_so: Callable[[], object], seconds: float = 180) -> None:
    """Wait until something is so; fail if it takes longer than that."""
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def apart(work: Callable[[], object]) -> int:
    """Begin something in a forked child, which ends with 1 if it fails, and return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child
