"""``eval reference --retrieval``: what questions are answered from, and how their chunks are encoded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_lab.eval import EvalContext, EvalSetting, EvalTask, evaluate, parse_methods, reference_task
from cacheblend_lab.eval.inquiry import Inquiry, inquire
from cacheblend_lab.eval.retrieve import RetrievalSetting, Retriever, found_chunks
from cacheblend_lab.settings import engine_settings
from cacheblend_lab.training.corpus import NOTES, Document, eval_examples
from cacheblend_rag import BlendEngine
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.errors import ConfigError
from tests.command import run

READING = reference_task(60, style=NOTES)


@pytest.fixture(scope="module")
def ranked() -> EvalTask:
    return reference_task(12, style=NOTES, retrieval="ranked", documents=20, per_context=4)


def _asked(task: EvalTask) -> list[tuple[EvalContext, int]]:
    return [(context, number) for context in task.contexts for number in range(len(context.questions))]


def test_all_retrievals_ask_the_same_questions_of_the_same_documents() -> None:
    for retrieval in ("shuffled", "dropped"):
        task = reference_task(60, style=NOTES, retrieval=retrieval)
        for ours, theirs in zip(task.contexts, READING.contexts, strict=True):
            assert (ours.texts, ours.documents) == (theirs.texts, theirs.documents)
            assert sum(ours.documents) == len(ours.texts)
            assert tuple(replace(question, chunks=None) for question in ours.questions) == theirs.questions


def test_two_in_five_chunks_are_dropped_but_never_the_one_that_states_the_answer() -> None:
    task = reference_task(400, style=NOTES, retrieval="dropped")
    sources = [question.source for example in eval_examples(400, 7, style=NOTES) for question in example.questions]
    total = kept = 0
    for (context, number), source in zip(_asked(task), sources, strict=True):
        question = context.questions[number]
        assert question.chunks is not None and list(question.chunks) == sorted(set(question.chunks))
        assert source in question.chunks and question.answers[0] in context.texts[source]
        total += len(context.texts) - 1
        kept += len(question.chunks) - 1
    assert kept / total == pytest.approx(0.6, abs=0.03)
    assert task.mean_chunks(6) == pytest.approx(kept / 400 + 1)


def test_ranked_chunks_are_the_nearest_of_a_corpus(ranked: EvalTask) -> None:
    assert [context.questions[n].id for context, n in _asked(ranked)] == [f"7-{n}" for n in range(12)]
    hits = 0
    for context, number in _asked(ranked):
        question = context.questions[number]
        assert question.chunks is not None and len(set(question.chunks)) == 12
        # Whole documents are there, found chunks or not.
        assert sum(context.documents) == len(context.texts) > 12
        hits += any(question.answers[0] in context.texts[chunk] for chunk in question.chunks)
    assert hits >= 6
    assert reference_task(12, style=NOTES, retrieval="ranked", documents=20, per_context=4).contexts == ranked.contexts
    documents = [
        Document("Sella Borler", ("She keeps a goose.", "She lives in Kelport.")),
        Document("Vecdyne", ("It makes tents.",)),
    ]
    asked = ["Where does Sella Borler live?", "What does Vecdyne make?"]
    found = found_chunks(documents, asked, 2, Embedding())
    assert [row[0] for row in found] == [(0, 1), (1, 0)]
    assert all(len(row) == 2 for row in found)


def test_a_prompt_has_the_chunks_asked_from_and_its_documents_are_stored_whole(engine: BlendEngine) -> None:
    task = reference_task(8, style=NOTES, retrieval="dropped")
    [context, *_] = task.contexts
    with inquire(task, context, Retriever(engine.tokenizer, RetrievalSetting()), [engine]) as inquiries:
        for question, inquiry in inquiries:
            assert isinstance(inquiry, Inquiry) and question.chunks is not None
            assert list(inquiry.texts) == [context.texts[chunk] for chunk in question.chunks]
            assert [record.text_hash for record in engine.records(inquiry.ids) if record] == list(
                map(text_hash, inquiry.texts)
            )
        documents = engine.places(engine.ids())
        counts = {documents.count(f"document {number}") for number in range(len(context.documents))}
        assert len(documents) > 8 and counts <= {0, *context.documents}
    assert engine.ids() == []


def test_what_cannot_be_retrieved_is_refused() -> None:
    for wrong in ({"retrieval": "sorted"}, {"documents": 0}, {"top_k": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            reference_task(4, style=NOTES, **wrong)  # type: ignore[arg-type]


def test_a_run_is_resumed_with_its_own_retrieval_and_encodings_only(model_folder: Path, tmp_path: Path) -> None:
    def resume(retrieval: str, *methods: str, code: int = 0) -> str:
        asked = "eval reference --questions 10 --max-new-tokens 2 --together --workers 2 --retrieval"
        told = ("--methods", ", ".join(methods), "--selectors", "", "--ratios", "")
        return run(
            f"{asked} {retrieval}",
            *("--model", model_folder, *told, "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md"),
            code=code,
        ).output

    resume("shuffled", "reuse", "reuse companions=neutral")
    whole = json.loads((tmp_path / "r.json").read_text())
    assert (whole["task"], whole["setting"]["retrieval"]) == ("reference (shuffled)", "shuffled")
    assert {row["method"] for row in whole["rows"]} == {"full", "reuse", "reuse companions=neutral"}
    assert "10 of them were taken from" in resume("shuffled", "reuse", "reuse companions=neutral")
    for retrieval, methods, reason in (
        ("dropped", ("reuse", "reuse companions=neutral"), "task is"),
        ("shuffled", ("reuse", "reuse companions=similar"), "methods"),
    ):
        output = resume(retrieval, *methods, code=2)
        assert "answers of another evaluation" in " ".join(output.split()) and reason in output


@pytest.mark.parametrize("questions", [20, pytest.param(200, marks=pytest.mark.full)])
def test_small_chunks_know_what_their_document_said_before(questions: int) -> None:
    task = reference_task(questions, style=NOTES, retrieval="shuffled")
    setting = EvalSetting(parse_methods("reuse, reuse companions=neutral"), resamples=200, together=True)
    with BlendEngine.from_pretrained("reference", **engine_settings(device="cpu")) as engine:
        result = evaluate(engine, "reference", task, setting)
        assert engine.ids() == []
    rows = {row.method: row for row in result.rows if row.kind == "all"}
    right = {name: row.metrics["exact_match"].mean for name, row in rows.items()}
    assert right["reuse"] >= right["full"] + 0.1
    assert right["reuse"] >= right["reuse companions=neutral"] + 0.1
    assert right["reuse companions=neutral"] >= right["full"] - 0.1
    assert rows["reuse"].charged_ratio == 0.0
    for row in rows.values():
        difference = row.minus_full["exact_match"]
        assert difference.mean == pytest.approx(right[row.method] - right["full"])
        assert difference.low <= difference.mean <= difference.high
