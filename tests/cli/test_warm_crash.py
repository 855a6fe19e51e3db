"""``kill -9`` and Ctrl-C in the middle of ``warm``: the next one finishes, and all is there that an undisturbed run leaves."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from cacheblend_rag.documents.settings import LibrarySettings, kv_folder
from cacheblend_rag.store import check_store
from tests.cli.conftest import passages_of
from tests.command import run

WAYS = [(0, signal.SIGINT), *(pytest.param(number, signal.SIGKILL, marks=pytest.mark.full) for number in range(20))]


@pytest.mark.parametrize(("number", "how"), WAYS)
def test_it_is_finished(model_folder: Path, tmp_path: Path, number: int, how: signal.Signals) -> None:
    lines = [f"Mara {each} lives in town {each * 7} with a boat of {each * 3} feet." for each in range(80)]
    (tmp_path / "mara.txt").write_text("\n\n".join(lines), encoding="utf-8")
    store = tmp_path / "store"
    warm = ["warm", str(tmp_path / "mara.txt"), "--model", str(model_folder), "--chunk-tokens", "60"]
    command = [sys.executable, "-m", "cacheblend_rag.cli", *warm, "--library", str(store)]
    # A shell has what it runs in the background ignore it.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        while not list(kv_folder(store).rglob("*.safetensors")) and process.poll() is None:
            time.sleep(0.001)
        # Eighty passages take a second or two.
        time.sleep(number / 20)
        process.send_signal(how)
        assert process.stderr is not None
        said = process.stderr.read()
    if how == signal.SIGINT:
        assert process.returncode == 130, said
        assert "Traceback" not in said
    left = LibrarySettings.load(store)
    assert left is not None and left.finished is (process.returncode == 0)
    run(*warm, "--library", store)
    done = LibrarySettings.load(store)
    assert done is not None and done.finished
    report = check_store(kv_folder(store))
    assert (report.problems, report.names) == ([], 80) and len(passages_of(store)) == 80
