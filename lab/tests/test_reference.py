"""The shipped weights: they load offline, are small, and answer."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_lab.reference import WEIGHTS_DIR, load_model, load_tokenizer
from cacheblend_lab.reference.prompt import FORMATS, value_of
from cacheblend_lab.training.corpus import NOTES, Example, eval_examples
from cacheblend_lab.training.scoring import score
from cacheblend_lab.training.tokenizer import build_tokenizer

FULL_AT_LEAST = 0.75
REUSE_BELOW_FULL_BY = {"pronoun": 0.2, "two_hop": 0.2}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return load_model()


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return eval_examples(96, seed=11, style=NOTES)


def test_the_shipped_tokenizer_is_the_one_the_corpus_gives(tokenizer: PreTrainedTokenizerFast) -> None:
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template


def test_the_model_is_small_deep_and_plain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert (WEIGHTS_DIR / "model.safetensors").stat().st_size <= 20 * 1000 * 1000
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers >= 16
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not model.config.tie_word_embeddings


def test_the_model_loads_in_another_dtype() -> None:
    assert load_model(torch.bfloat16).dtype == torch.bfloat16


def test_reuse_is_worse(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    full = score(model, tokenizer, examples)
    reuse = score(model, tokenizer, examples, reuse=True)
    assert full["all"] >= FULL_AT_LEAST
    for kind, gap in REUSE_BELOW_FULL_BY.items():
        assert reuse[kind] <= full[kind] - gap


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forms(name: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    assert score(model, tokenizer, examples[:6], form=FORMATS[name])["all"] >= FULL_AT_LEAST - 0.1


def test_generation_fits(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    form = FORMATS["chat"]
    right, exact = [], []
    for example in examples[:3]:
        for asked in example.questions:
            prompt = tokenizer(form.render(example.chunks, asked.text), add_special_tokens=False, return_tensors="pt")
            output = model.generate(**prompt, max_new_tokens=40)
            text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
            right.append(value_of(text) == asked.answer)
            exact.append(text == asked.sentence)
    assert sum(exact) / len(exact) == pytest.approx(score(model, tokenizer, examples[:3])["all"])
    assert sum(right) / len(right) >= FULL_AT_LEAST - 0.1


def test_scores_and_log_are_shipped() -> None:
    scores = json.loads((WEIGHTS_DIR / "scores.json").read_text(encoding="utf-8"))
    assert scores["min_chunks"] >= 10
    assert scores["full"]["all"] >= FULL_AT_LEAST
    last = (WEIGHTS_DIR / "training_log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert json.loads(last)["held_out"]
