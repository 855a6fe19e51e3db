"""Batches, attention, the optimizer and the training loop, on models of a few thousand weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cacheblend_rag.lab.training.batch import BRANCHED, IGNORED, Batch, collate, copy_batch, encode_example
from cacheblend_rag.lab.training.corpus import eval_examples, make_example
from cacheblend_rag.lab.training.curriculum import STAGES, Stage, brief_stages
from cacheblend_rag.lab.training.scoring import answer_logits, correct_answers, score
from cacheblend_rag.lab.training.tokenizer import build_tokenizer
from cacheblend_rag.lab.training.train import Options, Trainer, main, run
from cacheblend_rag.reference.prompt import FORMATS, value_of

TOKENIZER = build_tokenizer()
TINY = Options(layers=2, hidden=32, heads=2, intermediate=48, lr=3e-3, warmup=5)
STYLES = {stage.name: stage.style for stage in STAGES if stage.style is not None}
SHORT = (Stage("sentences", replace(STYLES["attributes"], people=(2, 2)), rows=4, questions=3),)


@pytest.fixture
def batch() -> Batch:
    examples = eval_examples(12, seed=1)
    return collate([encode_example(TOKENIZER, example, FORMATS["llama_index_chat"], gap=3) for example in examples])


def test_a_row_is_the_prompt_with_each_answer_after_its_question() -> None:
    example = eval_examples(4, seed=2)[0]
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


def test_branched_attention_equals_the_dense_mask(batch: Batch) -> None:
    trainer = Trainer(TINY, SHORT)
    with torch.no_grad():
        branched, labels = answer_logits(trainer.model, batch)
        trainer.model.set_attn_implementation("sdpa")
        dense, same_labels = answer_logits(trainer.model, batch)
    assert trainer.model.config._attn_implementation != BRANCHED
    assert torch.equal(labels, same_labels)
    assert not branched.isnan().any()
    torch.testing.assert_close(branched, dense, atol=1e-5, rtol=1e-4)


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


def test_copying_rows_hold_distinct_tokens_twice() -> None:
    batch = copy_batch(random.Random(0), TOKENIZER, rows=3, length=10)
    for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
        copied = [label for label in labels if label != IGNORED]
        assert ids[1:11] == copied
        assert len(set(copied)) == 10


def test_copies_stand_at_another_distance_in_every_row() -> None:
    batch = copy_batch(random.Random(0), TOKENIZER, rows=16, length=10)
    distances = batch.positions[:, 12] - batch.positions[:, 1]
    assert len(set(distances.tolist())) > 8
    assert bool((distances >= 11).all())
    # Within the run and within its copy, positions follow each other.
    for first, last in ((1, 11), (12, 20)):
        assert torch.equal(batch.positions[:, last] - batch.positions[:, first], torch.full((16,), last - first))


def test_answers_of_the_first_questions_grow_from_what_the_context_says() -> None:
    texts = []
    for name in ("pairs", "pairs_one_apart", "pairs_two_apart", "side_by_side"):
        example = make_example(random.Random(3), STYLES[name], "train", 8)
        question = example.questions[0]
        subject = example.chunks[question.support[0]].removesuffix(f" {question.answer}.")
        texts.append(question.sentence.removeprefix(subject).removesuffix(f"{question.answer}."))
    assert texts == [" ", " in ", " born in ", " was born in "]


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


def test_a_share_of_the_contexts_is_shuffled(tmp_path: Path) -> None:
    read, half, mixed = (Trainer(replace(TINY, shuffled=share), SHORT) for share in (0.0, 0.5, 1.0))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(half.batches(3), half.batches(3), strict=True))
    held_out, nothing = read.check()
    in_order, shuffled = mixed.check()
    assert held_out == in_order
    assert nothing == {} and shuffled.keys() == in_order.keys()
    assert not all(torch.equal(a.ids, b.ids) for a, b in zip(read.batches(3), mixed.batches(3), strict=True))
    half.options = replace(half.options, end_step=50)
    run(half, tmp_path, save_every=50)
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert record["held_out_shuffled"].keys() == record["held_out"].keys()


def test_a_run_writes_log_and_checkpoint_and_ends(tmp_path: Path) -> None:
    trainer = Trainer(replace(TINY, end_step=50, decay=20), (replace(STAGES[0], rows=2), *SHORT))
    run(trainer, tmp_path, save_every=25, export_to=None)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [50]
    assert records[0]["stage"] == "copy"
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_curriculum_goes_on_when_a_goal_is_reached_or_the_steps_are_spent() -> None:
    easy = replace(SHORT[0], goal=0.0)
    trainer = Trainer(TINY, (easy, replace(easy, goal=1.01, max_steps=0), easy))
    trainer.check()
    assert trainer.stage == 1
    trainer.check()
    assert trainer.stage == 2
    trainer.check()
    assert trainer.stage == 2


def test_scores_name_every_kind() -> None:
    trainer = Trainer(TINY, SHORT)
    scores = score(trainer.model, TOKENIZER, eval_examples(16), reuse=True)
    assert set(scores) == {"all", "single", "pronoun", "two_hop"}
    assert all(0 <= value <= 1 for value in scores.values())


def test_verdicts_are_given_for_every_question(batch: Batch) -> None:
    trainer = Trainer(TINY, SHORT)
    questions = {(row, int(b)) for row in range(len(batch.ids)) for b in batch.branches[row].unique() if b > 0}
    assert set(correct_answers(trainer.model, batch)) == questions


def test_the_command_line_trains_exports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--hidden", "32", "--heads", "2", "--intermediate", "32"]
    common = ["--out", str(tmp_path / "run"), *sizes]
    main([*common, "--end-step", "2"])
    main([*common, "--end-step", "3", "--resume", "--export", str(tmp_path / "weights"), "--export-questions", "8"])
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "scores.json"} <= names
    scores = json.loads((tmp_path / "weights" / "scores.json").read_text())
    assert scores["step"] == 3
    assert set(scores["full"]) >= {"all", "single"}


def test_training_goes_on_from_exported_weights(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--hidden", "32", "--heads", "2", "--intermediate", "32"]
    weights = tmp_path / "weights"
    main(
        [
            "--out",
            str(tmp_path / "first"),
            *sizes,
            "--end-step",
            "1",
            "--export",
            str(weights),
            "--export-questions",
            "8",
        ]
    )
    # Without a step to take, what comes out is what went in; and --resume without a checkpoint is no error.
    again = ["--out", str(tmp_path / "second"), *sizes, "--resume", "--begin-from", str(weights), "--end-step", "0"]
    main([*again, "--export", str(tmp_path / "copy"), "--export-questions", "8"])
    first, copy = (load_file(folder / "model.safetensors") for folder in (weights, tmp_path / "copy"))
    assert first.keys() == copy.keys()
    assert all(torch.equal(weight, copy[name]) for name, weight in first.items())


def test_brief_answers_are_values_and_names() -> None:
    stages = brief_stages(STAGES)
    style = stages[-1].style
    assert style is not None and style.brief and style.people == (3, 5)
    example = make_example(random.Random(3), style, "train", 40)
    kinds = {question.kind for question in example.questions}
    assert {"single", "pronoun", "two_hop"} <= kinds
    for question in example.questions:
        assert question.sentence.endswith(f"{question.answer}.")
        assert (question.sentence == f"{question.answer}.") == (question.kind != "two_hop")
        assert value_of(question.sentence) == question.answer
    # Nothing but the answers differs.
    whole = make_example(random.Random(3), replace(style, brief=False), "train", 40)
    assert whole.chunks == example.chunks
    assert [question.text for question in whole.questions] == [question.text for question in example.questions]
    # Pairs of name and value stay whole, for they come before values alone.
    assert [stage.name for stage in stages if stage.style is not None and not stage.style.brief] == [
        "pairs",
        "pairs_one_apart",
        "pairs_two_apart",
    ]
    trainer = Trainer(replace(TINY, brief=True, stage=2))
    assert trainer.stages == stages and trainer.stage == 2
