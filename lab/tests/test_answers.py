"""The table of answers: full prefill beside stored KV, on a model that is made here."""

import json
from pathlib import Path

import pytest
import torch

from cacheblend_lab.answers import ANSWER_TOKENS, FULL_PREFILL, Trial, copying, ledgers, manual, table
from cacheblend_lab.sets import Question, QuestionSet, holds
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from tests.engines import documents_of
from tests.families import tiny_model, tiny_tokenizer, words

DOCUMENTS = [words(40, seed) for seed in range(3)]
ASKED = [Question(words(4, 9), ("nothing",), (0, 1, 2)), Question(words(4, 10), ("nothing",), (1,))]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer())
    return Trial(engine, QuestionSet(DOCUMENTS, ASKED, score=holds), tmp_path, 12, 3)


def test_what_is_recomputed_whole_is_full_prefill(trial: Trial) -> None:
    rows = list(trial.ask(0, ["own", "own/boundary@1", "neutral"]))
    assert [row["way"] for row in rows] == ["full", "own", "own/boundary@1", "neutral"]
    full, own, whole, _ = rows
    assert whole["loss"] < 1e-6 and whole["same"] and whole["answer"] == full["answer"]
    assert own["loss"] > 1e-3
    assert [json.loads(json.dumps(row)) for row in rows] == rows
    trial.close()


def test_the_loss_is_that_of_naive_distributions(trial: Trial) -> None:
    prompt = trial.prompt(ASKED[0])
    engine = trial.engine("own")
    answer = engine.generate(prompt, ANSWER_TOKENS, blend=FULL_PREFILL, do_sample=False).token_ids
    [_, row] = trial.ask(0, ["own"])
    losses = []
    for number in range(len(answer)):
        segments = [*prompt.segments, answer[:number]] if number else prompt.segments
        given = engine.prefill(BlendPrompt(segments=segments)).logits.log_softmax(-1)
        ids = torch.tensor([[*engine.prompt_ids(prompt), *answer[:number]]])
        with torch.no_grad():
            wanted = engine.model(ids).logits[0, -1].log_softmax(-1)
        losses.append(torch.nn.functional.kl_div(given, wanted, log_target=True, reduction="sum"))
    assert row["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-3)
    trial.close()


def test_chunks_are_those_of_the_questions_documents(trial: Trial) -> None:
    assert len(trial.prompt(ASKED[0]).segments) == 5
    ids = [segment.id for segment in trial.prompt(ASKED[1]).segments[1:-1]]  # type: ignore[union-attr]
    assert {documents_of(trial.engine("own"), [id])[0] for id in ids} == {"1"}
    trial.close()


def test_table() -> None:
    fixed = {"answer": "", "score": 1.0}
    rows = [
        fixed | {"number": q, "way": way, "right": right, "same": right, "loss": loss, "seconds": seconds}
        for q, right, loss in (("a", True, 1), ("b", False, 4))
        for way, right, loss, seconds in (("full", True, 0, 2), ("own", right, loss, 0.5))
    ]
    assert table(rows).splitlines()[-1] == "| own | 2.5000 | 2.5000 | 1.000 | 1 of 2 | 1 of 2 | 0.50 | 4.0x |"


def test_own_sets() -> None:
    given = manual()
    assert len(given.questions) == 150 and all(question.answers for question in given.questions)
    sentences = copying(given, 3)
    assert len(sentences.questions) > 30
    for question in sentences.questions:
        assert any(f"{question.text} {question.answers[0]}" in " ".join(text.split()) for text in given.documents)
    for number, question in enumerate(ledgers(3).questions):
        text = ledgers(3).documents[number]
        assert question.documents == (number,) and all(figure in text for figure in question.answers[0].split())
