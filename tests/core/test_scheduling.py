"""The lock on a model leaves no threads behind that others' kernels would have to share the processors with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, threading, time
import torch
from cacheblend_rag.engine.scheduling import SchedulerLock

def threads():
    return len(os.listdir("/proc/self/task"))

def left():
    # Workers are told to end, not waited for.
    until = time.monotonic() + 10
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    return threads()

def compute():
    with lock, lock:
        torch.ones(1 << 20).sum()
        inside.append(threads())

torch.set_num_threads(3)
lock, inside = SchedulerLock(), []
before = threads()
compute()
after = left()
other = threading.Thread(target=compute)
other.start()
other.join()
compute()
print([count - before for count in [*inside, after, left()]])
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_who_leaves_the_model_leaves_no_workers() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    # Two workers while it computes, in another thread beside that one; none afterwards.
    assert ran.stdout.strip() == "[2, 3, 2, 0, 0]"
