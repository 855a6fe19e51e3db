"""``calibrate`` from documents or from what was warmed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_lab.reference import demo_documents
from tests.cli.conftest import Command, read_rows


@pytest.fixture
def calibrate(run: Command, tmp_path: Path) -> Any:
    """``calibrate`` on two questions; returns its output."""
    questions = tmp_path / "questions.txt"
    questions.write_text("Where was Mara born?\n\nWho rests in the harbour?\n", encoding="utf-8")

    def call(*arguments: Any) -> str:
        # What is measured is tested elsewhere.
        options = ["--questions", questions, "--target", "0.97", "--top-k", "2"]
        return run("calibrate", *options, *arguments).output

    return call


def test_from_documents(calibrate: Any, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    options = [documents, "--model", model_folder, "--chunk-tokens", "40"]
    output = calibrate(*options, "--ratios", "0.999,0.998", "--json", tmp_path / "found.json")
    assert output.endswith("\nrecompute_ratio: 0.998\n")
    rows = read_rows(tmp_path / "found.json")
    assert [row["recompute_ratio"] for row in rows] == [0.998, 0.999]
    assert all(abs(row["recovered"] - 1) < 0.03 for row in rows)
    assert not (tmp_path / ".cacheblend").exists()


def test_what_was_warmed(calibrate: Any, run: Command, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run("warm", documents, "--library", store, "--model", model_folder, "--chunk-tokens", "40")
    config = tmp_path / "blend.yaml"
    config.write_text("recompute_ratio: 0.5\nenabled: false\n")
    output = calibrate("--library", store, "--config", config, "--ratios", "0.999", "--selector", "random")
    assert output.endswith("\nrecompute_ratio: 0.999\nenabled: true\nselector: random\n")
    run("store", "check", "--store", store)


def test_without_questions_passages_are_asked_how_they_go_on(run: Command, tmp_path: Path) -> None:
    folder, file = tmp_path / "long", tmp_path / "found.json"
    folder.mkdir()
    for number, document in enumerate(demo_documents()):
        (folder / f"{number}.txt").write_text("\n\n".join(document.chunks), encoding="utf-8")
    options = ["--model", "reference", "--ratios", "0,0.5", "--target", "0.1", "--json", file]
    output = run("calibrate", folder, *options).output
    assert [row["recompute_ratio"] for row in read_rows(file)] == [0, 0.5]
    found = json.loads(file.read_text())
    assert found["questions"] == 16 and found["full_loss"] < found["bare_loss"]
    assert output.endswith("\nrecompute_ratio: 0.0\n")
    short = tmp_path / "short.txt"
    short.write_text("Too few words.")
    assert "--questions" in run("calibrate", short, "--model", "reference", code=2).output
