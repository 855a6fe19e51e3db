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

State = tuple[dict[str, tuple[str, Any]], set[str], str]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files with 80 passages."""
    folder = tmp_path_factory.mktemp("documents")
    rng = random.Random(0)
    for file in range(4):
        lines = [f"Mara {n} lives in town {rng.randrange(999)} with a boat in {rng.randrange(99)}." for n in range(20)]
        (folder / f"{file}.txt").write_text("\n\n".join(f"{line} Number {file}." for line in lines), encoding="utf-8")
    return folder


def command(documents: Path, store: Path, model_folder: Path) -> list[str]:
    return ["warm", str(documents), "--store", str(store), "--model", str(model_folder), "--chunk-tokens", "90"]


def state_of(store: Path, model_folder: Path) -> State:
    """Return passages in Chroma, names in the store, and an answer."""
    with open_engine(str(model_folder), store=kv_folder(store)) as engine:
        names = set(engine.ids())
    answer = run("ask", "Where does Mara 17 live?", "--store", store, "--max-new-tokens", "12", "--no-stream").stdout
    return passages_of(store), names, answer.splitlines()[0]


@pytest.fixture(scope="module")
def undisturbed(documents: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[State, float]:
    """Return what an undisturbed run left, and its time from the first write."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    run(*command(documents, store, model_folder))
    seconds = time.time() - min(file.stat().st_mtime for file in kv_folder(store).rglob("*.safetensors"))
    return state_of(store, model_folder), seconds


@pytest.mark.parametrize(
    ("number", "how"),
    [(10, signal.SIGINT), *(pytest.param(n, signal.SIGKILL, marks=pytest.mark.full) for n in range(KILLS))],
)
def test_it_is_finished(
    documents: Path,
    model_folder: Path,
    undisturbed: tuple[State, float],
    tmp_path: Path,
    number: int,
    how: signal.Signals,
) -> None:
    store = tmp_path / "store"
    arguments = command(documents, store, model_folder)
    with subprocess.Popen(
        [sys.executable, "-m", "cacheblend_rag.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A shell has what it runs in the background ignore it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while not list(kv_folder(store).rglob("*.safetensors")) and process.poll() is None:
            time.sleep(0.001)
        # Moments at random, one in each twentieth of the run.
        time.sleep((number + random.Random(number).random()) / KILLS * undisturbed[1])
        process.send_signal(how)
        assert process.stderr is not None
        said = process.stderr.read()
    if how == signal.SIGINT:
        assert process.returncode == 130, said
        assert "Traceback" not in said and "to continue" in said.splitlines()[-1]
    run(*arguments)
    run("store", "check", "--store", store)
    assert state_of(store, model_folder) == undisturbed[0]
