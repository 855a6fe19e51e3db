"""``kill -9`` and Ctrl-C in the middle of ``warm``: the next one finishes, and everything is as after an undisturbed run."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine
from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.documents.settings import kv_folder
from tests.cli.conftest import passages_of
from tests.command import read_rows, run

KILLS = 20
QUESTIONS = ("Where does Mara 17 live?", "What is kept in harbour 40?", "Who moved to town 111?")


@dataclass(frozen=True)
class Warmed:
    """What an undisturbed run left: passages in Chroma, names in the store, answers; and its time from the first write."""

    passages: dict[str, tuple[str, Any]]
    names: set[str]
    answers: list[str]
    seconds: float


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


def start(arguments: list[str], store: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own and return when it has written its first file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "cacheblend_rag.cli", *arguments], env=environment)
    while not (store / "library.json").exists() and process.poll() is None:
        time.sleep(0.001)
    return process


def state_of(store: Path, model_folder: Path, folder: Path) -> tuple[dict[str, tuple[str, Any]], set[str], list[str]]:
    passages = passages_of(store)
    engine: BlendEngine
    with open_engine(str(model_folder), store=kv_folder(store)) as engine:
        names = set(engine.ids())
    answers = []
    for question in QUESTIONS:
        run("ask", question, "--store", store, "--max-new-tokens", "12", "--json", folder / "ask.json")
        row = read_rows(folder / "ask.json")[0]
        assert row["misses"] == 0
        answers.append(f"{row['answer']} {[source['id'] for source in row['sources']]}")
    return passages, names, answers


@pytest.fixture(scope="module")
def undisturbed(documents: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(*command(documents, folder / "store", model_folder))
    seconds = time.time() - min(file.stat().st_mtime for file in kv_folder(folder / "store").rglob("*.safetensors"))
    return Warmed(*state_of(folder / "store", model_folder, folder), seconds)


@pytest.mark.full
@pytest.mark.parametrize("number", range(KILLS))
def test_it_is_finished(documents: Path, model_folder: Path, undisturbed: Warmed, tmp_path: Path, number: int) -> None:
    store = tmp_path / "store"
    arguments = command(documents, store, model_folder)
    # Moments at random, one in each twentieth of the run.
    moment = (number + random.Random(number).random()) / KILLS * undisturbed.seconds
    process = start(arguments, store)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    run(*arguments)
    assert "is clean" in run("store", "check", "--store", store).stdout
    passages, names, answers = state_of(store, model_folder, tmp_path)
    assert passages == undisturbed.passages
    assert names == undisturbed.names
    assert answers == undisturbed.answers


def test_ctrl_c_says_what_is_kept(documents: Path, model_folder: Path, undisturbed: Warmed, tmp_path: Path) -> None:
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
        assert process.stderr is not None
        # What comes before is about these words, which no tokenizer knows.
        assert "warming: 0 of 80\n" in process.stderr
        # Once some of it is stored.
        while len(list(kv_folder(store).rglob("*.safetensors"))) < 20:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    found = re.search(r"^stopped: the KV of (\d+) of 80 passages is in .*; .* to continue", said, re.MULTILINE)
    assert found is not None, said
    kept = int(found[1])
    run(*arguments, "--json", tmp_path / "warm.json")
    assert read_rows(tmp_path / "warm.json")[0]["encoded"] <= 80 - kept
    passages, names, _ = state_of(store, model_folder, tmp_path)
    assert (passages, names) == (undisturbed.passages, undisturbed.names)
