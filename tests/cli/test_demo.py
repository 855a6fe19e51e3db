"""``demo`` on the tiny model: nonsense answers, but through both frameworks, Chroma and the embedding model in earnest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cacheblend_rag.demo.corpus import best_documents, demo_chunks, demo_questions
from cacheblend_rag.demo.run import summarize

from .conftest import Command, read_rows


def test_both_frameworks_answer_by_every_method_and_the_second_run_is_warm(
    run: Command, model_folder: Path, tmp_path: Path
) -> None:
    chunks = len(demo_chunks("any"))
    assert chunks >= 40
    options = ["--dir", tmp_path / "demo", "--model", model_folder, "--questions", "2", "--rounds", "1"]
    file = tmp_path / "demo.json"
    first = run("demo", *options, "--json", file)
    rows = read_rows(file)
    asked = {question.text for question in demo_questions(2)}
    assert {(row["framework"], row["question"], row["method"]) for row in rows} == {
        (framework, question, method)
        for framework in ("llama_index", "langchain")
        for question in asked
        for method in ("full", "blend", "blend 0.15")
    }
    for row in rows:
        assert 12 <= row["chunks"] <= 20
        assert row["hits"] == (None if row["method"] == "full" else row["chunks"])
        assert row["ttft_s"] > 0
        if row["method"] == "full":
            assert row["same_as_full"]
            assert row["speedup"] == 1
            assert row["charged_ratio"] == 1
    ingestion = json.loads(file.read_text())["ingestion"]
    assert [(each["framework"], each["chunks"]) for each in ingestion] == [
        ("llama_index", chunks),
        ("langchain", chunks),
    ]
    assert ingestion[0]["encoded"] == chunks
    assert f"llama_index: {chunks} chunks in Chroma, {chunks} encoded in this run" in first.stdout

    second = run("demo", *options, "--json", file)
    assert [each["encoded"] for each in json.loads(file.read_text())["ingestion"]] == [0, 0]
    assert f"langchain: {chunks} chunks in Chroma, 0 encoded in this run" in second.stdout
    answers = {(row["framework"], row["question"], row["method"]): row["answer"] for row in rows}
    for row in read_rows(file):
        assert row["answer"] == answers[row["framework"], row["question"], row["method"]]


def test_a_missing_package_is_named(
    run: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langchain_chroma", None)
    monkeypatch.delitem(sys.modules, "cacheblend_rag.demo.langchain", raising=False)
    result = run("demo", "--dir", tmp_path / "demo", "--model", model_folder, code=2)
    assert "the demo needs a package that is not installed (langchain_chroma)" in result.stderr
    # It is found missing before a model is loaded.
    assert not (tmp_path / "demo").exists()


def test_documents_are_chosen_whole_best_first() -> None:
    sizes = [5, 5, 5, 5, 5, 3]
    assert best_documents([3, 0, 3, 4, 1, 2], sizes, 16) == [0, 1, 3, 4]
    assert best_documents([5, 0, 1, 2, 3], sizes, 16) == [0, 1, 2, 5]
    assert best_documents([2], sizes, 16) == [2]
    assert best_documents([0], [40], 16) == [0]
    assert best_documents([0, 1], [40, 5], 16) == [0]
    assert best_documents([], sizes, 16) == []


def test_the_summary_counts_by_framework_and_method() -> None:
    assert summarize([]) == []
