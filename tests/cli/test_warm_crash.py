"""``kill -9`` and Ctrl-C in the middle of ``warm``: the next one finishes, and everything is as after an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.documents.settings import kv_folder
from tests.cli.conftest import passages_of
from tests.command import run

KILLS = 20
WAYS = [(10, signal.SIGINT), *(pytest.param(n, signal.SIGKILL, marks=pytest.mark.full) for n in range(KILLS))]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[str]:
    """What warms four files with 80 passages, but for the store."""
    folder, rng = tmp_path_factory.mktemp("documents"), random.Random(0)
    for file in range(4):
        lines = [f"Mara {n} lives in town {rng.randrange(999)} with a boat in {rng.randrange(99)}." for n in range(20)]
        (folder / f"{file}.txt").write_text("\n\n".join(f"{line} Number {file}." for line in lines), encoding="utf-8")
    return ["warm", str(folder), "--model", str(model_folder), "--chunk-tokens", "90", "--store"]


def state_of(store: Path, model_folder: Path) -> Any:
    """Return passages in Chroma, names in the store, and an answer."""
    with open_engine(str(model_folder), store=kv_folder(store)) as engine:
        names = set(engine.ids())
    answer = run("ask", "Where does Mara 17 live?", "--store", store, "--max-new-tokens", "12", "--no-stream").stdout
    return passages_of(store), names, answer.splitlines()[0]


@pytest.fixture(scope="module")
def undisturbed(
    arguments: list[str], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, float]:
    """Return what an undisturbed run left, and its time from the first write."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    run(*arguments, store)
    seconds = time.time() - min(file.stat().st_mtime for file in kv_folder(store).rglob("*.safetensors"))
    return state_of(store, model_folder), seconds


@pytest.mark.parametrize(("number", "how"), WAYS)
def test_it_is_finished(
    arguments: list[str], model_folder: Path, undisturbed: Any, tmp_path: Path, number: int, how: signal.Signals
) -> None:
    store, (state, seconds) = tmp_path / "store", undisturbed
    command = [sys.executable, "-m", "cacheblend_rag.cli", *arguments, str(store)]
    # A shell has what it runs in the background ignore it.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        while not list(kv_folder(store).rglob("*.safetensors")) and process.poll() is None:
            time.sleep(0.001)
        # Moments at random, one in each twentieth of the run.
        time.sleep((number + random.Random(number).random()) / KILLS * seconds)
        process.send_signal(how)
        assert process.stderr is not None
        said = process.stderr.read()
    if how == signal.SIGINT:
        assert process.returncode == 130, said
        assert "Traceback" not in said
    run(*arguments, store)
    run("store", "check", "--store", store)
    assert state_of(store, model_folder) == state
