"""Bounds on what one call, and the tests of a folder, may take."""

import gc
import resource
import time
from collections.abc import Iterator
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
