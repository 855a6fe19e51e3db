"""``python -m vllm_cacheblend.launch``: vLLM's server, which ends with the process that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Have the kernel stop this process when its parent is gone; what is not Linux has no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv.pop(1)))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
