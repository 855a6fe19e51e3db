"""The fault commands in short, and whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults import damage, documents, ingestions
from tests.limits import one_thread as one_thread
from tests.store.kit import start

WHOLE = [pytest.mark.full, pytest.mark.timeout(1800)]


def nothing_is_wrong(run: Callable[..., list[str]], *arguments: object) -> None:
    """See that a command finds nothing wrong, in a process that has no threads, since the command forks."""
    process = start(_run, run, *arguments)
    process.join()
    assert process.exitcode == 0


def _run(run: Callable[..., list[str]], *arguments: object) -> None:
    torch.set_num_threads(1)
    found = run(*arguments)
    assert found == [], found


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=WHOLE)])
def test_documents_are_not_stale_after_kills(tmp_path: Path, kills: int) -> None:
    nothing_is_wrong(documents.run, tmp_path / "run", kills)
    # Something was there to go stale.
    looked = [line for line in (tmp_path / "run.log").read_text().splitlines() if line.startswith("looked")]
    assert any(line != "looked 0" for line in looked)


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=WHOLE)])
def test_damaged_stores_heal(count: int) -> None:
    assert damage.run(count) == []


@pytest.mark.parametrize(
    ("framework", "kills"),
    [("llama_index", 1), *(pytest.param(name, 50, marks=WHOLE) for name in ("llama_index", "langchain"))],
)
def test_nothing_is_left_and_nothing_lost_after_an_ingestion_is_killed(
    tmp_path: Path, framework: str, kills: int
) -> None:
    nothing_is_wrong(ingestions.run, tmp_path / "run", framework, kills)
