"""The lock on a model leaves no threads behind that others' kernels would have to share the processors with."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from cacheblend_rag.engine.scheduling import SchedulerLock
from tests.store.kit import start_with_pipe


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _count(pipe: Connection) -> None:
    torch.set_num_threads(3)
    lock, counts, before = SchedulerLock(), list[int](), _threads()

    def compute() -> None:
        with lock, lock:
            torch.ones(1 << 20).sum()
            counts.append(_threads() - before)

    def left() -> int:
        # Workers are told to end, not waited for.
        until = time.monotonic() + 10
        while _threads() > before and time.monotonic() < until:
            time.sleep(0.01)
        return _threads() - before

    compute()
    after = left()
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    compute()
    pipe.send([*counts, after, left()])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_who_leaves_the_model_leaves_no_workers() -> None:
    process, pipe = start_with_pipe(_count)
    # Two workers while it computes, in another thread beside that one; none afterwards.
    assert pipe.recv() == [2, 3, 2, 0, 0]
    process.join()
