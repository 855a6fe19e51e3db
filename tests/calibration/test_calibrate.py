"""Calibration: the ratio that is chosen, when none is, and the bound it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.calibration import ModelCall, calibrate, calibrate_asking
from cacheblend_rag.calibration.calibrate import CalibrationRow, confirmed, explain, least_questions, lower_bound
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.lab.settings import engine_settings
from cacheblend_rag.lab.training.corpus import NOTES, eval_examples
from cacheblend_rag.reference.prompt import DEFAULT_FORMAT, FORMATS
from tests.families import tiny_model, tiny_tokenizer, words


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained("reference", **engine_settings(device="cpu", preamble="")) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts() -> list[BlendPrompt]:
    form = FORMATS[DEFAULT_FORMAT]
    return [
        BlendPrompt(form.prefix(), [Chunk(text) for text in each.chunks], form.suffix(question.text), form.separator)
        for each in eval_examples(40, seed=3, style=NOTES)
        for question in each.questions
        if question.kind in ("pronoun", "single")
    ]


def test_the_smallest_ratio_that_agrees_is_chosen(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    seen: list[str] = []
    # Of a prompt recomputed all but for two in a thousand tokens nothing is left to differ.
    found = calibrate(
        engine, prompts[:10], ratios=(0.998, 0.0, 0.999), agreement=0.7, confidence=0.9, progress=seen.append
    )
    first, second, third = found.rows
    assert [row.recompute_ratio for row in found.rows] == [0.0, 0.998, 0.999]
    assert not first.reached and second.reached and third.reached
    assert first.questions < 10
    assert first.agreement_low < first.agreement <= first.f1 < 1
    assert (second.questions, second.agreement, second.f1) == (10, 1.0, 1.0)
    assert second.first_token_kl <= first.first_token_kl
    assert second.charged_ratio > 0.9 > first.charged_ratio
    assert (found.recompute_ratio, found.selector, found.questions, found.skipped) == (0.998, "hkvd", 10, 0)
    assert found.reason.startswith("0.998 is the smallest ratio tried")
    assert found.reason.endswith("and 0.999 does too.")
    assert seen[0] == "preparing question 1" and seen[-1] == "ratio 0.999"


def test_questions_without_chunks_are_skipped_and_several_engines_refused(
    engine: BlendEngine, prompts: list[BlendPrompt]
) -> None:
    options: dict[str, Any] = {"ratios": (0.998,), "agreement": 0.3, "confidence": 0.6, "max_new_tokens": 4}
    plain = BlendPrompt("Who lives there?")

    def ask(number: int) -> list[ModelCall]:
        calls = [
            ModelCall(engine, plain, None),
            ModelCall(engine, prompts[number], None),
            ModelCall(engine, plain, None),
        ]
        return calls[:1] if number == 1 else calls

    found = calibrate_asking(ask, [0, 1, 2], **options)
    assert (found.questions, found.skipped, found.recompute_ratio) == (2, 1, 0.998)
    with BlendEngine(engine.model, engine.tokenizer, **engine_settings(self_check=False)) as other:
        with pytest.raises(ConfigError, match="by several engines; calibrate one at a time"):
            calibrate_asking(
                lambda call: [call], [ModelCall(each, prompts[0], None) for each in (engine, other)], **options
            )
    with pytest.raises(ConfigError, match="agreement=2 must be above 0 and below 1"):
        calibrate_asking(ask, [0, 1, 2], agreement=2)


def test_none_is_chosen_where_none_agrees(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    random = "random(seed=3)"
    found = calibrate(engine, prompts[:10], selector=random, ratios=(0.0, 0.05), agreement=0.7, confidence=0.9)
    assert found.recompute_ratio is None
    assert found.selector == "random"
    assert found.reason.startswith("No ratio up to 0.05 is shown to agree")
    reason, *rows = str(found).splitlines()
    assert reason == found.reason
    assert [("given up then" in row) for row in rows] == [row.questions < 10 for row in found.rows]


def test_a_ratio_whose_next_fails_is_not_trusted() -> None:
    def row(ratio: float, agreement: float) -> CalibrationRow:
        return CalibrationRow(ratio, ratio, 9, agreement, agreement - 0.1, 1.0, 0.0, 0.5, agreement > 0.9)

    rows = [row(0.1, 1.0), row(0.2, 0.5), row(0.3, 0.95), row(0.4, 0.95)]
    chosen = confirmed(rows)
    assert chosen is rows[2]
    assert "0.1 also did, but not the next larger one" in explain(rows, chosen, 0.8, 0.9)
    assert confirmed(rows[:1]) is rows[0]
    assert confirmed(rows[:2]) is None


def tiny(**changes: Any) -> BlendEngine:
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(**{"preamble": ""} | changes))


def exact(count: int) -> list[BlendPrompt]:
    """Prompts whose only chunk stands right behind its preamble: exact at every ratio."""
    return [BlendPrompt("", [Chunk(words(6, number))], words(3, 100 + number)) for number in range(count)]


def test_the_smallest_of_all_is_confirmed_by_the_next() -> None:
    with tiny(encode_on="second_use") as engine:
        found = calibrate(engine, exact(60), ratios=(0.0, 0.1, 0.2, 0.3), agreement=0.9, max_new_tokens=2)
        assert [row.recompute_ratio for row in found.rows] == [0.0, 0.1]
        assert found.recompute_ratio == 0.0


def test_prompts_that_are_never_blended_say_nothing() -> None:
    with tiny() as engine:
        bare = BlendPrompt("", [], words(3, 2))
        found = calibrate(engine, [bare, *exact(8)], ratios=(0.1,), agreement=0.7, confidence=0.9, max_new_tokens=2)
        assert (found.questions, found.skipped, found.recompute_ratio) == (8, 1, 0.1)
        with pytest.raises(ConfigError, match=r"1 questions \(1 more are prefilled"):
            calibrate(engine, [bare, *exact(1)], ratios=(0.1,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agreement": 1.0}, "agreement=1.0 must be above 0"),
        ({"agreement": float("nan")}, "agreement=nan"),
        ({"confidence": 0.4}, "confidence=0.4"),
        ({"ratios": (0.5, 1.0)}, "from 0 to below 1"),
        ({"ratios": ()}, "one at least"),
        ({"ratios": (float("nan"),)}, "ratios="),
        ({"selector": "none"}, "the same tokens at every ratio"),
        ({"selector": "best"}, "unknown selector 'best'"),
        ({}, "give at least 119"),
    ],
)
def test_what_cannot_be_calibrated(options: dict[str, Any], message: str) -> None:
    with tiny() as engine, pytest.raises(ConfigError, match=message):
        calibrate(engine, exact(2), **options)


def test_a_model_that_cannot_be_blended() -> None:
    with tiny() as engine:
        engine.unsupported_reason = "it has no attention"
        with pytest.raises(UnsupportedModelError, match="it has no attention; there is nothing to calibrate"):
            calibrate(engine, exact(2))


@given(st.integers(1, 400), st.floats(0.5, 0.9999), st.data())
def test_the_bound(count: int, confidence: float, data: st.DataObject) -> None:
    agreeing = data.draw(st.integers(0, count))
    low = lower_bound(agreeing, count, confidence)
    assert 0 <= low <= agreeing / count + 1e-12
    if agreeing < count:
        assert low < lower_bound(agreeing + 1, count, confidence)
    assert low >= lower_bound(agreeing, count, min(0.99999, confidence + 0.00005)) - 1e-12


def test_the_bound_is_wilsons() -> None:
    from scipy.stats import binomtest

    for agreeing, count in ((0, 5), (3, 7), (45, 50), (50, 50)):
        # A two-sided interval of 90 % has the lower end of a one-sided one of 95 %.
        low = binomtest(agreeing, count).proportion_ci(0.9, method="wilson").low
        assert lower_bound(agreeing, count, 0.95) == pytest.approx(low)


@given(st.floats(0.01, 0.995), st.floats(0.5, 0.9999))
def test_the_least_number_of_questions(agreement: float, confidence: float) -> None:
    count = least_questions(agreement, confidence)
    assert lower_bound(count, count, confidence) >= agreement
    assert count == 1 or lower_bound(count - 1, count - 1, confidence) < agreement


def test_what_chunks_remember_is_compared_with_whole_documents(engine: BlendEngine) -> None:
    form = FORMATS[DEFAULT_FORMAT]
    prompts, answers, number = [], [], 0
    for each in eval_examples(40, seed=3, style=NOTES):
        # Without the chunks before them, which say who "she" is.
        ids = [f"memory-{(number := number + 1)}" for _ in each.chunks]
        pairs = zip(ids, each.chunks, strict=True)
        engine.add([Chunk(text + form.separator, id, document=ids[0]) for id, text in pairs])
        for question in each.questions:
            if question.kind == "pronoun":
                supporting = [ids[place] for place in question.support[-1:]]
                prompts.append(BlendPrompt(form.prefix(), supporting, form.suffix(question.text)))
                answers.append(question.answer)
    found = calibrate(engine, prompts, ratios=(0.0, 0.9), agreement=0.5, confidence=0.8)
    assert found.recompute_ratio == 0.0, found
    judged = calibrate(engine, prompts, answers=answers, ratios=(0.0, 0.9), agreement=0.5, confidence=0.8)
    assert judged.recompute_ratio == 0.0 and judged.questions <= found.questions, judged
    engine.delete([id for id in engine.ids() if id.startswith("memory-")])


def test_nothing_is_chosen_where_whole_documents_do_not_fit() -> None:
    with tiny(context_tokens=None) as engine:
        engine.add([Chunk(words(100, n), f"n{n}", document="d", start=1000 * n) for n in range(6)])
        prompts = [BlendPrompt(words(3, n), [f"n{n % 6}", f"n{(n + 1) % 6}"], words(3, n + 1)) for n in range(12)]
        assert engine.whole_documents(prompts[1]) is None
        found = calibrate(engine, prompts, ratios=(0.0,), agreement=0.3, confidence=0.6)
        assert found.recompute_ratio is None and found.reason.startswith("Nothing is chosen")
