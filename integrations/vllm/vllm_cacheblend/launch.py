"""``python -m vllm_cacheblend.launch``: vLLM's server as a good neighbour of the process that started it.

It ends with that process, however that ends, and lets it have its turn where there are few cores.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import signal
import struct
import sys

__all__ = ["take_short_turns"]

_PR_SET_PDEATHSIG = 1
# The system call's number by machine; Python has no name for it, nor has every C library.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


def _end_with(parent: int) -> None:
    """Have the kernel stop this process when its parent is gone; what is not Linux has no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def take_short_turns() -> None:
    """Have the kernel run this process, and those that it starts, in short turns (Linux from 6.12 on; nothing elsewhere).

    While vLLM's processes wait for one another they spin, and give up their turn again and again. For that the kernel owes them
    less and less, until a process that shares a core with one of them, its server or ours, may wait for hundreds of milliseconds.
    What a turn that is given up costs is its length. The priority stays as it is.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    # What refuses it, as some sandboxes do, leaves vLLM as it is.
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


if __name__ == "__main__":
    _end_with(int(sys.argv.pop(1)))
    take_short_turns()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
