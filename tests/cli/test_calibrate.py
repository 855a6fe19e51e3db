"""``calibrate`` from documents or from what was warmed, to the settings file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Command, read_rows

# Two questions and an easy target: what is measured is tested elsewhere.
EASY = ["--agreement", "0.2", "--confidence", "0.6", "--max-new-tokens", "3", "--top-k", "2"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("Where was Mara born?\n\nWho rests in the harbour?\n", encoding="utf-8")
    return path


@pytest.fixture
def calibrate(run: Command, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``calibrate`` on two questions; returns its output and the file of settings."""
    # A ratio near 1 is near full prefill of the chunks, which is what chunks encoded alone are compared with.
    monkeypatch.setenv("CACHEBLEND_CONTEXT", "none")

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
    assert "0.998 is the smallest ratio tried" in output
    assert f"{config} says recompute_ratio: 0.998" in output
    rows = read_rows(tmp_path / "found.json")
    assert [row["recompute_ratio"] for row in rows] == [0.998, 0.999]
    assert rows[0]["agreement"] == 1.0
    assert not (tmp_path / ".cacheblend").exists()


def test_from_what_was_warmed(
    calibrate: Any, run: Command, documents: Path, model_folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run("warm", documents, "--store", store, "--model", model_folder, "--chunk-tokens", "40")
    (tmp_path / "blend.yaml").write_text("recompute_ratio: auto\nenabled: false\n")
    output, config = calibrate("--store", store, "--ratios", "0.999", "--selector", "random")
    assert config.read_text() == "recompute_ratio: auto\nenabled: true\nquality_ratio: 0.999\nselector: random\n"
    assert "random against full prefill" in output
    run("store", "check", "--store", store)


def test_when_no_ratio_agrees(calibrate: Any, documents: Path, model_folder: Path) -> None:
    options = [documents, "--model", model_folder, "--chunk-tokens", "40", "--ratios", "0,0.02"]
    output, config = calibrate(*options, code=1)
    assert "No ratio up to 0.02 is shown to agree" in output
    assert "nothing is written" in output
    assert not config.exists()
    calibrate(*options, "--disable")
    assert config.read_text() == "enabled: false\n"


def test_nothing_is_written_unless_wanted(calibrate: Any, documents: Path, model_folder: Path) -> None:
    options = [documents, "--model", model_folder, "--chunk-tokens", "40", "--ratios", "0.999"]
    _, config = calibrate(*options, "--no-write")
    assert not config.exists()


def test_too_few_questions(calibrate: Any, documents: Path, model_folder: Path) -> None:
    output, config = calibrate(documents, "--model", model_folder, "--agreement", "0.99", code=2)
    assert "2 questions cannot show an agreement of 0.99" in output
    assert not config.exists()


def test_mistakes(calibrate: Any, run: Command, questions: Path, tmp_path: Path) -> None:
    assert "nothing was warmed into" in calibrate("--store", tmp_path / "none", code=2)[0]
    assert "does not exist" in calibrate(tmp_path / "none", code=2)[0]
    (tmp_path / "blend.yaml").write_text("ratio: 0.2\n")
    assert "unknown setting ratio" in calibrate(tmp_path, code=2)[0]
    assert "cannot be read" in run("calibrate", "--questions", tmp_path / "none.txt", code=2).output
    elsewhere = tmp_path / "none" / "blend.yaml"
    assert "does not exist" in run("calibrate", "--questions", questions, "--config", elsewhere, code=2).output
