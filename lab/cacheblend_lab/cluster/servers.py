"""Real replicas on this machine: processes of ``cacheblend-rag serve`` over one remote tier, and the CPU time they took."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.settings import environment_without_settings
from cacheblend_rag.errors import CacheBlendError

__all__ = ["Servers", "cpu_s", "machine_s"]

_STARTS_S = 120
_ENDS_S = 30


class Servers:
    """Servers of one model, each with RAM and a disk folder of its own, over one remote tier; a context manager.

    Each computes in one thread, so that what it takes of the machine's cores is known. `urls` say where they answer, and
    `process_ids` which they are.
    """

    def __init__(self, folder: Path, model: str, count: int, capacities: Capacities, remote: str) -> None:
        self._folder, self._model, self._count = folder, model, count
        self._capacities, self._remote = capacities, remote
        self._processes: list[subprocess.Popen[str]] = []
        self._closing = ExitStack()
        self.urls: list[str] = []

    def __enter__(self) -> Servers:
        # What is set for others, names that machines share above all, is not for these.
        environment = environment_without_settings() | {
            "CACHEBLEND_RAM_BYTES": str(int(self._capacities.ram_bytes)),
            "CACHEBLEND_DISK_BYTES": str(int(self._capacities.disk_bytes)),
            "CACHEBLEND_REMOTE": self._remote,
            # What a request costs is not to depend on those before it.
            "CACHEBLEND_PREFIX_BYTES": "0",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        try:
            for number in range(self._count):
                self._processes.append(self._start(number, environment))
            self.urls = [self._address(number, process) for number, process in enumerate(self._processes)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them all, and wait for that."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._closing.close()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def stored_bytes(self) -> tuple[int, int]:
        """Return how many chunk files the first server's disk has, and their bytes together."""
        sizes = [file.stat().st_size for file in (self._folder / "0" / "kv").rglob("*.safetensors")]
        return len(sizes), sum(sizes)

    def _start(self, number: int, environment: dict[str, str]) -> subprocess.Popen[str]:
        log = self._closing.enter_context((self._folder / f"{number}.log").open("w", encoding="utf-8"))
        command = [sys.executable, "-m", "cacheblend_rag.cli", "serve", "--backend", "engine", "--port", "0"]
        command += ["--model", self._model, "--store", str(self._folder / str(number))]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        if process.stdout is not None:
            self._closing.enter_context(process.stdout)
        return process

    def _address(self, number: int, process: subprocess.Popen[str]) -> str:
        """Return where a server says that it answers."""
        line = process.stdout.readline() if process.stdout is not None else ""
        url = line.strip().rpartition(" ")[2].removesuffix("/v1")
        if not url.startswith("http"):
            raise CacheBlendError(f"a server did not start; its log is {self._folder / f'{number}.log'}")
        httpx.get(f"{url}/readyz", timeout=_STARTS_S).raise_for_status()
        return url


def cpu_s(process_ids: Sequence[int]) -> float:
    """Return the seconds of CPU time that processes and this one have taken so far."""
    own = os.times()
    return own.user + own.system + sum(map(_of_process, process_ids))


def machine_s() -> float:
    """Return the seconds of CPU time that all of the machine's processes together have taken so far."""
    figures = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()[1:]
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, figures)
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def _of_process(process_id: int) -> float:
    # The name, in brackets, may hold blanks.
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
