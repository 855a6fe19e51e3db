"""Batches, attention, the optimizer and the training loop, on models of a few thousand weights."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheblend_lab.reference.prompt import FORMATS, value_of
from cacheblend_lab.training.batch import BRANCHED, IGNORED, Batch, collate, encode_example, verdict_batch
from cacheblend_lab.training.corpus import NOTES, eval_examples
from cacheblend_lab.training.curriculum import STAGES, Stage
from cacheblend_lab.training.paragraphs import Paragraphs
from cacheblend_lab.training.questions import KINDS
from cacheblend_lab.training.scoring import answer_logits, correct_answers
from cacheblend_lab.training.tokenizer import build_tokenizer
from cacheblend_lab.training.train import main, run
from cacheblend_lab.training.trainer import Options, Trainer
from cacheblend_lab.training.world import Style
from cacheblend_rag.errors import ConfigError

TOKENIZER = build_tokenizer()
SIZES = "--layers 1 --hidden 32 --heads 2 --intermediate 32".split()
TINY = Options(layers=2, hidden=32, heads=2, intermediate=48, lr=3e-3, warmup=5)
STYLES = {stage.name: stage.style for stage in STAGES if isinstance(stage.style, Style)}
FEW_WORDS = Paragraphs(people=(2, 2), firms=(0, 0), chunks=(1, 2), facts=(1, 1), words=(10, 14), total=(1, 4))
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


def test_questions_do_not_see_each_other(batch: Batch) -> None:
    mask = batch.mask()[:, 0]
    for row in range(mask.shape[0]):
        seen = batch.branches[row][None, :].expand_as(mask[row])[mask[row]]
        own = batch.branches[row][:, None].expand_as(mask[row])[mask[row]]
        assert bool(((seen == 0) | (seen == own)).all())


def test_reuse_lets_a_chunk_see_bos_and_itself_only(batch: Batch) -> None:
    mask = batch.mask(reuse=True)[0, 0]
    chunks = batch.chunks[0]
    for place in torch.nonzero(chunks >= 0).flatten().tolist():
        visible = torch.nonzero(mask[place]).flatten().tolist()
        assert visible[0] == 0
        assert all(chunks[other] == chunks[place] for other in visible[1:])
    question = int(torch.nonzero(batch.branches[0] == 1).flatten()[0])
    assert bool(mask[question][chunks >= 0].all())


def test_a_verdict_follows_the_two_values_that_it_is_about() -> None:
    batch = verdict_batch(random.Random(0), TOKENIZER, rows=30, sentences=4)
    seen = Counter[str]()
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        lines = TOKENIZER.decode(ids, skip_special_tokens=True).splitlines()[:4]
        wanted = [(at, label) for at, label in enumerate(labels) if label != IGNORED]
        assert [ids[at + 1] for at, _ in wanted] == [label for _, label in wanted]
        for line, (_, label) in zip(lines, wanted, strict=True):
            pair, _, verdict = line.partition(", so ")
            one, other = (value_of(clause) for clause in pair.split(" and "))
            assert verdict == TOKENIZER.decode(label).strip() == ("yes" if one == other else "no")
            seen[verdict] += 1
    assert 40 < seen["yes"] < 80 and seen.total() == 120


def test_a_few_steps_lower_the_loss() -> None:
    trainer = Trainer(TINY, SHORT)
    losses = [trainer.train_step() for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


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


def test_a_run_writes_log_and_checkpoint_and_ends(tmp_path: Path) -> None:
    trainer = Trainer(replace(TINY, end_step=50, decay=20), (replace(STAGES[0], rows=2), *SHORT))
    run(trainer, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [50]
    assert records[0]["stage"] == "copy"
    assert (tmp_path / "checkpoint.pt").exists()


def test_paragraphs_are_scored_in_each_order_and_the_log_says_so(tmp_path: Path) -> None:
    stage = Stage("paragraphs", FEW_WORDS, rows=3, questions=4, short_rows=1, goal=0.0)
    trainer = Trainer(replace(TINY, end_step=50), (stage, stage))
    trainer.step = 49
    run(trainer, tmp_path)
    [record] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name in ("held_out", "held_out_retrieved", "held_out_short"):
        assert {"all", "single", "unanswerable"} <= record[name].keys() <= {"all", *KINDS}
    assert trainer.stage == 1


def test_contexts_of_like_length_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(TINY, (Stage("paragraphs", FEW_WORDS, rows=5, verdicts=3, short_rows=2, questions=4),))
    copying, verdicts, *together = trainer.batches(3)
    assert copying.question_length == verdicts.question_length == 0
    assert [len(part.ids) for part in (verdicts, *together)] == [3, 5, 2]
    monkeypatch.setattr("cacheblend_lab.training.trainer._PART_TOKENS", 0)
    alone = trainer.batches(3)[2:]
    assert [len(part.ids) for part in alone] == [1] * 7

    def wanted(parts: list[Batch]) -> int:
        return sum(int((part.labels != IGNORED).sum()) for part in parts)

    assert wanted(alone) == wanted(together)


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(1486, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tokenizer of 1486 tokens, but the corpus gives one of"):
        Trainer(TINY, SHORT).begin_from(tmp_path)


def test_the_curriculum_goes_on_when_a_goal_is_reached_or_the_steps_are_spent() -> None:
    easy = replace(SHORT[0], goal=0.0)
    trainer = Trainer(TINY, (easy, replace(easy, goal=1.01, max_steps=0), easy))
    trainer.check()
    assert trainer.stage == 1
    trainer.check()
    assert trainer.stage == 2
    trainer.check()
    assert trainer.stage == 2


def test_verdicts_are_given_for_every_question(batch: Batch) -> None:
    trainer = Trainer(TINY, SHORT)
    questions = {(row, int(b)) for row in range(len(batch.ids)) for b in batch.branches[row].unique() if b > 0}
    assert set(correct_answers(trainer.model, batch)) == questions


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


def test_training_goes_on_from_exported_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    export = ["--export", str(weights), "--export-questions", "8"]
    main(["--out", str(tmp_path / "first"), *SIZES, "--end-step", "1", *export])
    # Without a step to take, what comes out is what went in; and --resume without a checkpoint is no error.
    again = ["--out", str(tmp_path / "second"), *SIZES, "--resume", "--begin-from", str(weights), "--end-step", "0"]
    main([*again, "--export", str(tmp_path / "copy"), "--export-questions", "8"])
    first, copy = (load_file(folder / "model.safetensors") for folder in (weights, tmp_path / "copy"))
    assert first.keys() == copy.keys()
    assert all(torch.equal(weight, copy[name]) for name, weight in first.items())
