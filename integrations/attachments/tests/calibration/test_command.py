"""``calibrate`` from documents or from what was warmed, to the settings file."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_lab.reference import demo_documents
from tests.cli.conftest import Command, read_rows

# Two questions: what is measured is tested elsewhere.
EASY = ["--target", "0.97", "--top-k", "2"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("Where was Mara born?\n\nWho rests in the harbour?\n", encoding="utf-8")
    return path


@pytest.fixture
def calibrate(run: Command, questions: Path, tmp_path: Path) -> Any:
    """``calibrate`` on two questions; returns its output and the file of settings."""

    def call(*arguments: Any, code: int = 0) -> tuple[str, Path]:
        config = tmp_path / "blend.yaml"
        result = run("calibrate", "--questions", questions, "--config", config, *EASY, *arguments, code=code)
        return result.output, config

    return call


def test_from_documents(calibrate: Any, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text("recompute_ratio: 0.3 # ours\nttl_s: 1\n")
    options = [documents, "--model", model_folder, "--chunk-tokens", "40", "--ratios", "0.999,0.998"]
    output, config = calibrate(*options, "--json", tmp_path / "found.json")
    assert config.read_text() == "recompute_ratio: 0.998 # ours\nttl_s: 1\n"
    assert "0.998 is the smallest ratio that reaches 0.97" in output
    assert f"{config} says recompute_ratio: 0.998" in output
    rows = read_rows(tmp_path / "found.json")
    assert [row["recompute_ratio"] for row in rows] == [0.998, 0.999]
    assert all(abs(row["recovered"] - 1) < 0.03 for row in rows)
    assert not (tmp_path / ".cacheblend").exists()


def test_what_was_warmed(calibrate: Any, run: Command, documents: Path, model_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    run("warm", documents, "--store", store, "--model", model_folder, "--chunk-tokens", "40")
    (tmp_path / "blend.yaml").write_text("recompute_ratio: 0.5\nenabled: false\n")
    output, config = calibrate("--store", store, "--ratios", "0.999", "--selector", "random")
    assert config.read_text() == "recompute_ratio: 0.999\nenabled: true\nselector: random\n"
    assert "recomputed by random" in output
    run("store", "check", "--store", store)


def test_nothing_is_written_unless_wanted(calibrate: Any, documents: Path, model_folder: Path) -> None:
    options = [documents, "--model", model_folder, "--chunk-tokens", "40", "--ratios", "0.999"]
    _, config = calibrate(*options, "--no-write")
    assert not config.exists()


def test_without_questions_passages_are_asked_how_they_go_on(run: Command, tmp_path: Path) -> None:
    folder, config, file = tmp_path / "long", tmp_path / "blend.yaml", tmp_path / "found.json"
    folder.mkdir()
    for number, document in enumerate(demo_documents()):
        (folder / f"{number}.txt").write_text("\n\n".join(document.chunks), encoding="utf-8")
    options = ["--model", "reference", "--config", config, "--ratios", "0,0.5", "--target", "0.1", "--json", file]
    result = run("calibrate", folder, *options)
    assert "16 questions in " in result.output and "without documents" in result.output
    rows = read_rows(file)
    assert [row["recompute_ratio"] for row in rows] == [0, 0.5]
    found = json.loads(file.read_text())
    assert found["full_loss"] < found["bare_loss"]
    assert config.read_text() == "recompute_ratio: 0.0\n"
    short = tmp_path / "short.txt"
    short.write_text("Too few words.")
    result = run("calibrate", short, "--model", "reference", "--config", config, code=2)
    assert "no passage has 36 words or more; give questions, by --questions" in " ".join(result.output.split())


def test_mistakes(calibrate: Any, run: Command, questions: Path, tmp_path: Path) -> None:
    assert "nothing was warmed into" in calibrate("--store", tmp_path / "none", code=2)[0]
    assert "does not exist" in calibrate(tmp_path / "none", code=2)[0]
    (tmp_path / "blend.yaml").write_text("ratio: 0.2\n")
    assert "unknown setting ratio" in calibrate(tmp_path, code=2)[0]
    assert "cannot be read" in run("calibrate", "--questions", tmp_path / "none.txt", code=2).output
    elsewhere = tmp_path / "none" / "blend.yaml"
    assert "does not exist" in run("calibrate", "--questions", questions, "--config", elsewhere, code=2).output
