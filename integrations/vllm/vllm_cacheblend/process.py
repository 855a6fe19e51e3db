"""A server of vLLM as a process of this one: started, waited for, stopped."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cacheblend_rag.errors import BackendError
from vllm_cacheblend.client import VLLMClient

__all__ = ["VLLMProcess"]

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_STOP_S = 30.0


class VLLMProcess:
    """A server that only this user's processes can ask; a context manager, which waits until it answers.

    Leaving the context raises `BackendError` if the server had ended by itself.

    Parameters
    ----------
    arguments : sequence of str
        What ``python -m vllm.entrypoints.openai.api_server`` is started with, besides its address.
    environment : mapping of str to str
        What its environment has, besides this process's: unlike arguments, only this user can read it.
    on_end : callable
        Called in a thread if the server ends by itself.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], on_end: Callable[[], None]) -> None:
        # In a folder that no other user can open: at a port vLLM answers all who reach it, on some paths without any key.
        self._folder = tempfile.TemporaryDirectory(prefix="cacheblend-")
        socket = Path(self._folder.name) / "vllm.sock"
        # The key that vLLM finds in the environment too, where there is one.
        self.client = VLLMClient(socket, os.environ.get("VLLM_API_KEY"))
        self._command = [sys.executable, "-m", "vllm_cacheblend.launch", str(os.getpid()), *arguments]
        self._command += ["--uds", str(socket)]
        self._environment = os.environ | environment
        self._on_end = on_end
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VLLMProcess:
        # In a session of its own: Ctrl-C is for us, who let answers end before vLLM is stopped.
        process = self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        try:
            while not self.client.is_up():
                if process.poll() is not None:
                    raise BackendError(
                        f"vLLM ended with status {process.returncode} before it answered; what it printed above says why"
                    )
                time.sleep(_POLL_S)
        except BaseException:
            self._stop(process)
            raise
        threading.Thread(target=self._watch, args=(process,), name="cacheblend-vllm", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        status = process.poll()
        self._stop(process)
        if status is not None and not isinstance(error, Exception):
            raise BackendError(f"vLLM ended with status {status}; what it printed above says why")

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._stopping.is_set():
            # Before anything else: what was killed has ended none of its workers, and they hold the weights.
            _end_group(process.pid)
            self._on_end()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to end, and end it with its workers if it does not."""
        self._stopping.set()
        self.client.close()
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("vLLM did not stop within %g s and is killed", _STOP_S)
        _end_group(process.pid)
        process.wait()
        self._folder.cleanup()


def _end_group(leader: int) -> None:
    """End what is left of a process's group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
