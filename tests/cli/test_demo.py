"""``demo`` on the tiny model: nonsense answers, but through both frameworks, Chroma and the embedding model in earnest."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.demo.corpus import DemoChunk, Question, demo_chunks, demo_questions
from cacheblend_rag.lab.bench.shapes import shape_config, text_of, word_tokenizer
from cacheblend_rag.lab.demo.example import best_example, explain
from cacheblend_rag.lab.demo.run import METHODS, Asked, Ingestion, score
from cacheblend_rag.lab.demo.screen import show_demo
from cacheblend_rag.lab.demo.size import RealSize, at_real_size

from .conftest import Command, read_rows


def test_both_frameworks_answer_by_every_method_and_the_second_run_is_warm(
    run: Command, model_folder: Path, tmp_path: Path
) -> None:
    folder, file, page = tmp_path / "demo", tmp_path / "demo.json", tmp_path / "page.html"
    options = ["--dir", folder, "--model", model_folder, "--questions", "2", "--top-k", "3", "--json", file]
    first = run("demo", *options)
    rows = read_rows(file)
    asked = {question.text for question in demo_questions(2)}
    assert {(row["framework"], row["question"], row["method"]) for row in rows} == {
        (framework, question, method)
        for framework in ("llama_index", "langchain")
        for question in asked
        for method in METHODS
    }
    lengths: dict[str, set[int]] = {method: set() for method in METHODS}
    for row in rows:
        assert row["hits"] == (3 if METHODS[row["method"]].blends else None)
        assert row["ttft_s"] > 0
        if row["framework"] == "langchain":
            lengths[row["method"]].add(row["prompt_tokens"])
    assert lengths["full"] == lengths["reuse"] == lengths["blend"]
    assert min(lengths["documents"]) > max(lengths["full"])
    chunks = len(demo_chunks("any"))
    assert re.search(rf"LlamaIndex: put in within .*, {chunks} chunks encoded\n", first.stdout)
    # The speed of a model of its own size is seen anyway.
    assert "at the shape of" not in first.stdout
    assert "<!doctype html>" in (folder / "answer.html").read_text().lower()

    second = run("demo", *options, "--html", page, "--verbose")
    assert re.search(rf"LangChain: put in within .*, 0 chunks encoded, the KV of {chunks} was there\n", second.stdout)
    assert all(f"{name}: {text}" in second.stdout for name in ("LlamaIndex", "LangChain") for text in asked)
    assert f"the page is {page}" in second.stdout and page.exists()
    answers = {(row["framework"], row["question"], row["method"]): row["answer"] for row in rows}
    for row in read_rows(file):
        assert row["answer"] == answers[row["framework"], row["question"], row["method"]]
    assert json.loads(file.read_text())["top_k"] == 3


def test_a_missing_package_is_named(
    run: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langchain_chroma", None)
    monkeypatch.delitem(sys.modules, "cacheblend_rag.lab.demo.langchain", raising=False)
    result = run("demo", "--dir", tmp_path / "demo", "--model", model_folder, code=2)
    assert "the demo needs a package that is not installed (langchain_chroma)" in result.stderr
    # It is found missing before a model is loaded.
    assert not (tmp_path / "demo").exists()


QUESTION = Question("Which pet does Ada Bell keep?", "grey cat", "Ada Bell keeps a grey cat.", "pronoun", (0, 2), 2)
CHUNKS = [
    DemoChunk(str(number), text, 0, {"document": document, "title": title, "number": 0})
    for number, (document, title, text) in enumerate(
        [
            (0, "Ada Bell", "Ada Bell was born in Kelport."),
            (0, "Ada Bell", "It often rains."),
            (0, "Ada Bell", "It rains. She keeps a grey cat. She sleeps badly."),
            (1, "Tom Reed", "Tom Reed keeps a young dog."),
        ]
    )
]


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ((2, 3), "Ada Bell is named in a chunk before it, which was not retrieved"),
        ((2, 3, 0), "which stands behind it in the order of retrieval"),
        ((0, 3, 2), "which stands elsewhere in the order of retrieval"),
        ((3, 0, 2), None),
        ((0, 1), None),
    ],
)
def test_what_a_chunk_out_of_its_document_hides_is_said(places: tuple[int, ...], why: str | None) -> None:
    said = explain(QUESTION, places, CHUNKS)
    if why is None:
        assert said is None
    else:
        assert said is not None and why in said and "“She keeps a grey cat.”" in said


def test_a_chunk_that_names_its_subject_hides_nothing() -> None:
    named = [*CHUNKS[:2], DemoChunk("2", "Ada Bell keeps a grey cat.", 0, CHUNKS[2].metadata)]
    assert explain(QUESTION, (2, 3), named) is None


def _asked(question: Question, places: tuple[int, ...], seconds: dict[str, float], **answers: str) -> list[Asked]:
    result: Any = None
    return [
        Asked("langchain", method, question, places, result, answers[method], {"prompt_tokens": 7}, seconds[method])
        for method in METHODS
    ]


def test_scores_and_the_example_follow_from_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = demo_chunks("langchain")
    # A question whose chunk hides who it is about, so that there is something to explain.
    question = next(each for each in demo_questions(200) if explain(each, [each.source], chunks) is not None)
    right, wrong = question.sentence, "She keeps a goose."
    seconds = {"full": 4.0, "documents": 8.0, "reuse": 1.0, "blend": 2.0}
    asked = _asked(question, (question.source,), seconds, full=wrong, documents=right, reuse=wrong, blend=right)
    other = Question("Where?", "Kelport", "She lives in Kelport.", "single", (0,), 0)
    asked += _asked(other, (0,), seconds, full=wrong, documents=wrong, reuse=wrong, blend=wrong)
    scores = score(asked)
    assert [(each.method, each.right, each.questions) for each in scores] == [
        ("full", 0, 2),
        ("documents", 1, 2),
        ("reuse", 0, 2),
        ("blend", 1, 2),
    ]
    assert [each.speedup for each in scores] == [1.0, 0.5, 4.0, 2.0]
    example = best_example(asked)
    assert example is not None and example.asked["blend"].question == question
    assert best_example(asked[len(METHODS) :]) is None

    ingestion = Ingestion("langchain", len(chunks), 4000, 3, 1.5)
    show_demo([ingestion], scores, 10, example, RealSize("qwen2-0.5b", 1000, 6.0, 0.2))
    shown = capsys.readouterr().out
    for line in ("in 44 chunks, 4,000 tokens", "An example. LangChain", example.why[:60], "30x as soon", "2.0x"):
        assert line in shown
    show_demo([ingestion], scores, 10, None, None)
    assert "No question told full prefill of the retrieved chunks and the default apart." in capsys.readouterr().out


def test_a_prompt_is_timed_at_the_shape_of_another_model() -> None:
    tokenizer = word_tokenizer(shape_config("tiny").vocab_size)
    texts = [text_of(range(start, start + 40)) for start in (300, 340, 380)]
    size = at_real_size(tokenizer, texts[:2], texts[2], "tiny")
    assert size.shape == "tiny" and size.prompt_tokens > 80
    assert size.full_s > 0 and size.blend_s > 0
