"""Calibration: what is measured, the ratio that is chosen, and when none is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from cacheblend_attachments.calibration import calibrate, calibrate_asking
from cacheblend_lab.reference.corpus import examples
from cacheblend_lab.reference.prompt import FORM
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.errors import ConfigError
from tests.families import tiny_model, tiny_tokenizer, words


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained("reference", **engine_settings(device="cpu", preamble="")) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts() -> list[BlendPrompt]:
    return [
        BlendPrompt(FORM.prefix(), [Chunk(text) for text in each.chunks], FORM.suffix(question.text), FORM.separator)
        for each in examples(40)
        for question in each.questions
        if question.kind in ("pronoun", "single")
    ]


def test_the_smallest_ratio_that_reaches_the_target_is_chosen(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    # Of a prompt recomputed all but for two in a thousand tokens nothing is left to differ.
    found = calibrate(engine, prompts[:10], ratios=(0.998, 0.0, 0.999), target=0.999)
    first, second, third = found.rows
    assert [row.recompute_ratio for row in found.rows] == [0.0, 0.998, 0.999]
    assert found.full_loss < first.loss < found.bare_loss
    assert first.recovered == pytest.approx((found.bare_loss - first.loss) / (found.bare_loss - found.full_loss))
    assert first.recovered_low < first.recovered < first.recovered_high
    assert second.recovered == pytest.approx(1, abs=1e-3) and third.recovered == pytest.approx(1, abs=1e-3)
    assert second.charged_ratio > 0.9 > first.charged_ratio
    assert (found.recompute_ratio, found.selector, found.questions, found.skipped) == (0.998, "boundary", 10, 0)
    assert "0.998" in found.reason and len(str(found).splitlines()) == 4
    none = calibrate(engine, prompts[:10], ratios=(0.0,), target=0.9999)
    assert none.recompute_ratio is None and "0.9999" in none.reason


def test_losses_are_those_of_the_models_own_forward(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    answers = [f"She lives in town {number}." for number in range(3)]
    found = calibrate(engine, prompts[:3], answers=answers, ratios=(0.0,))
    losses = []
    for prompt, answer in zip(prompts[:3], answers, strict=True):
        text = answer if str(prompt.segments[-1])[-1:].isspace() else f" {answer}"
        right = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*engine.prompt_ids(prompt), *right]])
        with torch.no_grad():
            logits = engine.model(ids).logits[0, -len(right) - 1 : -1]
        losses.append(float(cross_entropy(logits, torch.tensor(right))))
    assert found.full_loss == pytest.approx(sum(losses) / 3, abs=1e-4)


def test_the_last_call_with_chunks_of_each_question_is_measured(
    engine: BlendEngine, prompts: list[BlendPrompt]
) -> None:
    plain = BlendPrompt("Who lives there?")

    def ask(number: int) -> None:
        for prompt in (plain,) if number == 1 else (plain, prompts[number], plain):
            ModelCall(engine, prompt, None).note()

    found = calibrate_asking(ask, [0, 1, 2], ratios=(0.998,))
    assert (found.questions, found.skipped, found.recompute_ratio) == (2, 1, 0.998)
    with BlendEngine(engine.model, engine.tokenizer, **engine_settings(self_check=False)) as other:
        several = [ModelCall(each, prompts[0], None) for each in (engine, other)]
        for asked, questions, options in (
            (ModelCall.note, several, {}),
            (ask, [1], {}),
            (ask, "a question", {}),
            (ask, [0], {"target": 2}),
            (engine, [0], {}),
        ):
            with pytest.raises(ConfigError):
                calibrate_asking(asked, questions, **options)


def tiny() -> BlendEngine:
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(preamble=""))


def exact(count: int) -> list[BlendPrompt]:
    """Prompts whose only chunk stands right behind its preamble: exact at every ratio."""
    return [BlendPrompt("", [Chunk(words(6, number))], words(3, 100 + number)) for number in range(count)]


def test_prompts_that_are_never_blended_say_nothing() -> None:
    with tiny() as engine:
        bare = BlendPrompt("", [], words(3, 2))
        found = calibrate(engine, [bare, *exact(8)], ratios=(0.1,), max_new_tokens=2)
        assert (found.questions, found.skipped, found.recompute_ratio) == (8, 1, 0.1)
        assert found.rows[0].recovered == pytest.approx(1, abs=1e-3)
        with pytest.raises(ConfigError):
            calibrate(engine, [bare], ratios=(0.1,))


@pytest.mark.parametrize(
    "options",
    [
        *({"target": target} for target in (0.0, 2, float("nan"))),
        *({"ratios": ratios} for ratios in ((0.5, 1.0), (), (float("nan"),))),
        {"selector": "best"},
    ],
)
def test_what_cannot_be_calibrated(options: dict[str, Any]) -> None:
    with tiny() as engine, pytest.raises(ConfigError, match=next(iter(options))):
        calibrate(engine, exact(2), **options)


def test_questions_that_the_documents_do_not_answer(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    # What the model says without any chunk is likeliest without any.
    bare = BlendPrompt(segments=[each for each in prompts[0].segments if isinstance(each, str)])
    answer = engine.generate(bare, 24, do_sample=False).text
    with pytest.raises(ConfigError):
        calibrate(engine, prompts[:1], answers=[answer], ratios=(0.0,))
