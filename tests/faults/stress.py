"""Answers while the store is full, read-only, locked, gone, or its remote tier hangs or is dead.

Each fault lasts for some seconds, during which questions are asked without end: about chunks that are stored, and every third one
about a chunk that is not. Each must have the undisturbed answer, none may take longer than the limit that is documented, one
warning may be logged, and when the fault is over the store must be well without anybody doing anything::

    python -m tests.faults.stress --seconds 60
"""

import argparse
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import KVStore, open_remote, open_store
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import fill, remount, small_disk, writing_elsewhere
from tests.store.remote.conftest import RedisServer

# What an answer may take that waits for nothing, on a machine that is busy.
ORDINARY_S = 2.0
# How long the store may take to be well again; a remote tier is asked once a minute at least.
HEALING_S = 90.0
# As documented: a connection, tried twice, and an answer.
REMOTE_S = 2 * 1.0 + 5.0

# How many chunks are asked about that are not stored.
_FRESH = 200
_LEAST_ASKED = 200


@dataclass
class Outcome:
    """What one fault did."""

    name: str
    limit_s: float
    # A full disk says what it drops, and once more if in the end there is nothing left to drop.
    may_be_said: tuple[int, ...] = (1,)
    waits: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    healed_s: float = 0.0

    def judge(self, seconds: float) -> None:
        """Note what was not as it is to be; only the answer that finds a remote tier out of reach may wait for it."""
        slow = [wait for wait in self.waits if wait > ORDINARY_S]
        if max(self.waits) > self.limit_s:
            self.flaws.append(f"an answer took {max(self.waits):.2f} s")
        if len(slow) > 1 + 0.01 * len(self.waits):
            self.flaws.append(f"{len(slow)} answers waited")
        if len(self.warnings) not in self.may_be_said:
            self.flaws.append(f"{len(self.warnings)} warnings: {self.warnings[:3]}")
        if self.healed_s > HEALING_S:
            self.flaws.append("the store is not well")

    def __str__(self) -> str:
        waits = sorted(self.waits)
        half, most = waits[len(waits) // 2], waits[max(len(waits) * 99 // 100 - 1, 0)]
        return (
            f"{self.name:<16} {len(waits):>6} answers; {half * 1e3:6.0f} ms, p99 {most * 1e3:6.0f} ms, longest "
            f"{waits[-1] * 1e3:6.0f} ms of {self.limit_s:.0f} s; {len(self.warnings)} warning; well after {self.healed_s:.1f} s"
            + "".join(f"\n  {flaw}" for flaw in self.flaws[:10])
        )


@contextmanager
def warnings_in(found: list[str]) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # What a prompt that finds nothing stored says, once for an engine, is no fault's.
            if "none of the" not in record.msg:
                found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("cacheblend_rag")
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class Trial:
    """A store, and questions about what is in it."""

    def __init__(self) -> None:
        self.model, self.tokenizer = tiny_model("llama"), tiny_tokenizer()
        self.chunks = [Chunk(words(12, n), f"n{n}", document=f"d{n % 2}", start=100 * n) for n in range(8)]
        self.asked = 0
        with self.engine(None) as engine:
            engine.add(self.chunks)
            self.expected = [engine.prefill(self.prompt(n)).logits for n in range(4)]

    def engine(self, store: KVStore | Path | None) -> BlendEngine:
        settings = engine_settings(recompute_ratio=0.0, selector="none", self_check=False, disk_codec="native")
        return BlendEngine(self.model, self.tokenizer, **settings, store=store)

    def prompt(self, number: int, *more: Chunk) -> BlendPrompt:
        return BlendPrompt(words(3, 900), [*self.chunks[number : number + 4], *more], words(5, 901))

    def ask(self, engine: BlendEngine, outcome: Outcome) -> None:
        """Ask one question."""
        self.asked += 1
        number, is_new = self.asked % 4, self.asked % 3 == 0
        # Not ever more: what a small disk cannot hold is the names of all.
        which = self.asked % _FRESH
        fresh = [Chunk(words(10, 1_000 + which), f"fresh-{which}")] if is_new else []
        prompt = self.prompt(number, *fresh)
        started = time.perf_counter()
        answer = engine.prefill(prompt)
        outcome.waits.append(time.perf_counter() - started)
        if not fresh and (answer.logits - self.expected[number]).abs().max() > 1e-3:
            outcome.flaws.append(f"answer {self.asked} is another one")

    def is_well(self, engine: BlendEngine) -> bool:
        """Return whether the store has all that is asked for, and all that was computed meanwhile; what is asked is new to it."""
        self.asked += 1
        engine.prefill(self.prompt(0, Chunk(words(10, 10_000 + self.asked), f"new-{self.asked}")))
        engine._store.settle()
        hits = [engine.prefill(self.prompt(number)).report.hits for number in range(4)]
        return hits == [4] * 4 and engine._store.stats().waiting == 0


def suffer(
    trial: Trial,
    outcome: Outcome,
    engine: BlendEngine,
    fault: AbstractContextManager[object],
    seconds: float,
    healthy: Callable[[], bool] | None = None,
) -> Outcome:
    """Ask while there is a fault, and then until the store is well."""
    # What is done once in a process is no part of it.
    trial.ask(engine, Outcome("before", ORDINARY_S))
    with warnings_in(outcome.warnings):
        with fault:
            until = time.monotonic() + seconds
            # A slow machine would ask too little to fill what waits to be written.
            while time.monotonic() < until or len(outcome.waits) < _LEAST_ASKED:
                trial.ask(engine, outcome)
        ended = time.monotonic()
        while not (healthy() if healthy else trial.is_well(engine)) and outcome.healed_s < HEALING_S:
            time.sleep(0.2)
            outcome.healed_s = time.monotonic() - ended
    outcome.judge(seconds)
    return outcome


def filled(trial: Trial, folder: Path, seconds: float) -> Outcome:
    @contextmanager
    def full(disk: Path) -> Iterator[None]:
        other = fill(disk)
        yield
        other.unlink()

    with small_disk(folder, 3 * 2**20) as disk:
        store = open_store(disk / "store", 0, 10**9, write_back_bytes=10**6)
        with trial.engine(store) as engine:
            engine.add(trial.chunks)
            outcome = suffer(trial, Outcome("full disk", ORDINARY_S, (1, 2)), engine, full(disk), seconds)
        store.close()
    return outcome


def read_only(trial: Trial, folder: Path, seconds: float) -> Outcome:
    with small_disk(folder, 3 * 2**20) as disk:
        with trial.engine(disk / "store") as engine:
            engine.add(trial.chunks)
        remount(disk, "ro")
        with ExitStack() as engines:
            engine = engines.enter_context(trial.engine(disk / "store"))

            def healthy() -> bool:
                # Whoever opens it next may write.
                engines.close()
                remount(disk, "rw")
                with trial.engine(disk / "store") as other:
                    return trial.is_well(other)

            return suffer(trial, Outcome("read-only", ORDINARY_S), engine, nullcontext(), seconds, healthy)


def locked(trial: Trial, folder: Path, seconds: float) -> Outcome:
    # Of what waits for the lock, the first gives up meanwhile.
    store = open_store(folder, 10**7, write_back_bytes=10**7, lock_timeout_s=min(seconds / 2, 60.0))
    try:
        with trial.engine(store) as engine:
            engine.add(trial.chunks)
            return suffer(trial, Outcome("write lock", ORDINARY_S), engine, writing_elsewhere(folder), seconds)
    finally:
        store.close()


def remote(trial: Trial, folder: Path, seconds: float, number: int) -> Outcome:
    folder.mkdir()
    server = RedisServer(folder)
    server.start()

    @contextmanager
    def fault() -> Iterator[None]:
        server.signal(number)
        yield
        if number == signal.SIGSTOP:
            server.signal(signal.SIGCONT)
        else:
            server.kill()
            server.start()

    def healthy() -> bool:
        trial.asked += 1
        fresh = trial.prompt(0, Chunk(words(10, 10_000 + trial.asked), f"new-{trial.asked}"))
        engine.prefill(fresh)
        engine.flush()
        # What was lost with the server is computed once more, and read from there then.
        return {chunk.tier for chunk in engine.prefill(fresh).report.chunks} == {"disk", "redis"}

    name = "stopped Redis" if number == signal.SIGSTOP else "killed Redis"
    try:
        # There is room for a single chunk here: the others are read from the server.
        tier = open_remote(server.url(), read_timeout_s=min(seconds / 4, 5.0))
        store = open_store(folder / "store", 0, 12_000, write_back_bytes=10**6, remote=tier)
        with trial.engine(store) as engine:
            engine.add(trial.chunks)
            engine.flush()
            outcome = suffer(trial, Outcome(name, REMOTE_S + ORDINARY_S), engine, fault(), seconds, healthy)
        store.close()
        return outcome
    finally:
        server.kill()


FAULTS: dict[str, Callable[[Trial, Path, float], Outcome]] = {
    "full": filled,
    "read-only": read_only,
    "lock": locked,
    "stopped": lambda trial, folder, seconds: remote(trial, folder, seconds, signal.SIGSTOP),
    "killed": lambda trial, folder, seconds: remote(trial, folder, seconds, signal.SIGKILL),
}


def run(name: str, seconds: float) -> Outcome:
    """Try one fault."""
    with tempfile.TemporaryDirectory() as folder:
        return FAULTS[name](Trial(), Path(folder) / "place", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each fault lasts")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flaws = 0
    for name in arguments.fault or FAULTS:
        outcome = run(name, arguments.seconds)
        print(outcome, flush=True)
        flaws += len(outcome.flaws)
    sys.exit(bool(flaws))


if __name__ == "__main__":
    main()
