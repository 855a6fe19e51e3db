"""Batches, attention and the training loop, on models of a few thousand weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cacheblend_lab.reference.prompt import FORMATS
from cacheblend_lab.training.batch import BRANCHED, IGNORED, Batch, collate, encode_example
from cacheblend_lab.training.corpus import NOTES, eval_examples
from cacheblend_lab.training.curriculum import STAGES, Stage
from cacheblend_lab.training.scoring import answer_logits
from cacheblend_lab.training.tokenizer import build_tokenizer
from cacheblend_lab.training.train import main
from cacheblend_lab.training.trainer import Options, Trainer
from cacheblend_lab.training.world import Style

TOKENIZER = build_tokenizer()
SIZES = "--layers 1 --hidden 32 --heads 2 --intermediate 32".split()
TINY = Options(layers=2, hidden=32, heads=2, intermediate=48, lr=3e-3, warmup=5)
STYLES = {stage.name: stage.style for stage in STAGES if isinstance(stage.style, Style)}
SHORT = (Stage("sentences", replace(STYLES["attributes"], people=(2, 2)), rows=4, questions=3),)


@pytest.fixture
def batch() -> Batch:
    examples = eval_examples(12, seed=1, style=NOTES)
    return collate([encode_example(TOKENIZER, example, FORMATS["llama_index_chat"], gap=3) for example in examples])


def test_a_row_is_the_prompt_with_each_answer_after_its_question() -> None:
    example = eval_examples(4, seed=2, style=NOTES)[0]
    for form in FORMATS.values():
        row = encode_example(TOKENIZER, example, form)
        shared = [token for token, branch in zip(row.ids, row.branches, strict=True) if branch == 0]
        for number, question in enumerate(example.questions, start=1):
            own = [i for i, branch in enumerate(row.branches) if branch == number]
            text = form.render(example.chunks, question.text)
            expected = TOKENIZER(text, add_special_tokens=False)["input_ids"]
            answer = TOKENIZER(question.sentence, add_special_tokens=False)["input_ids"]
            assert [*shared, *(row.ids[i] for i in own)] == [*expected, *answer]
            assert [row.positions[i] for i in own] == list(range(len(shared), len(expected) + len(answer)))
            wanted = [row.labels[i] for i in own if row.labels[i] != IGNORED]
            assert wanted == [*answer, TOKENIZER.eos_token_id]


@pytest.mark.parametrize("block", [16, 10_000])
def test_branched_attention_equals_the_dense_mask(batch: Batch, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_lab.training.batch._BLOCK", block)
    model = Trainer(TINY, SHORT).model
    assert model.config._attn_implementation == BRANCHED
    branched, labels = answer_logits(model, batch)
    gradients = torch.autograd.grad(branched.square().sum(), list(model.parameters()))
    model.set_attn_implementation("sdpa")
    dense, same_labels = answer_logits(model, batch)
    assert torch.equal(labels, same_labels)
    torch.testing.assert_close(branched, dense, atol=1e-5, rtol=1e-4)
    for got, own in zip(gradients, torch.autograd.grad(dense.square().sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(got, own, atol=1e-5 * float(own.abs().max()), rtol=1e-3)


def test_a_resumed_run_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    whole = Trainer(TINY, SHORT)
    for _ in range(4):
        whole.train_step()
    whole.save(tmp_path / "checkpoint.pt")
    losses = [whole.train_step() for _ in range(4)]
    resumed = Trainer(TINY, SHORT)
    resumed.load(tmp_path / "checkpoint.pt")
    assert [resumed.train_step() for _ in range(4)] == losses
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def test_the_command_line_trains_exports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--out", str(tmp_path / "run"), *SIZES]
    main([*common, "--end-step", "2"])
    main([*common, "--end-step", "3", "--resume", "--export", str(tmp_path / "weights"), "--export-questions", "8"])
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "scores.json"} <= names
    scores = json.loads((tmp_path / "weights" / "scores.json").read_text())
    assert scores["step"] == 3
    for name in ("full", "reuse", "full_retrieved", "reuse_retrieved"):
        assert set(scores[name]) >= {"all", "single"}
