"""The server as people start it: the command, in a process of its own."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import psutil

ADDRESS = re.compile(r"answers at (http://\S+)/v1")
# The least that vLLM must be told to be up soon on a small machine.
VLLM = ("--backend", "vllm")
LEAST = ("--", *"--enforce-eager --max-model-len 2048 --block-size 32 --gpu-memory-utilization 0.2".split())


class ServerProcess:
    """A server that can be ended and started again at the same address.

    Parameters
    ----------
    log
        Where all that it says is added.
    *options
        What the command is given.
    python
        Of a virtual environment in which the project is.
    """

    def __init__(self, log: Path, *options: str, python: str | Path = sys.executable) -> None:
        self._log = log
        self._options = options
        self._python = python
        self._port = "0"
        self.url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)

    def start(self) -> None:
        """Start it, and return once it answers."""
        began = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as written:
            command = [str(self._python), "-c", "from cacheblend_rag.cli.app import app; app()", "serve"]
            command += ["--model", "reference", "--port", self._port, *self._options]
            self.process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            while (found := ADDRESS.search(self.said(began))) is None:
                if self.process.poll() is not None:
                    raise RuntimeError(self.said(began)[-4000:])
                time.sleep(0.1)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.url = found[1]
        self._port = self.url.rpartition(":")[2]

    def stop(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(90)

    def said(self, start: int = 0) -> str:
        return self._log.read_bytes()[start:].decode()

    def children(self) -> list[int]:
        """Return the processes that it has started, and those that these have."""
        return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]
