"""The generated corpus: determinism, disjoint halves, and questions that can be answered from their support."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheblend_lab.eval.datasets import load_task
from cacheblend_lab.reference.corpus import CORPUS_FILE, demo_documents, demo_questions
from cacheblend_lab.reference.prompt import ASSISTANT, BOS, FORMATS, USER, chat, value_of
from cacheblend_lab.training.corpus import NOTES, Example, demo_corpus, eval_examples, make_example
from cacheblend_lab.training.curriculum import STAGES
from cacheblend_lab.training.longbench import MADE_SUBTASKS, longbench_records, main
from cacheblend_lab.training.questions import KINDS
from cacheblend_lab.training.templates import ATTRIBUTES, COMPARISONS, question_templates, statement_templates
from cacheblend_lab.training.tokenizer import build_tokenizer, save_tokenizer
from cacheblend_lab.training.vocabulary import HEADS_AND_TAILS, PLAIN_PAIRS, Maker, is_held_out
from cacheblend_lab.training.world import Style
from cacheblend_rag.errors import ConfigError

NAMED_KINDS = ("person", "town", "firm", *PLAIN_PAIRS)


@pytest.fixture(scope="module")
def held_out() -> list[Example]:
    return eval_examples(600, seed=3, style=NOTES)


def test_examples_follow_from_the_seed() -> None:
    assert eval_examples(40, seed=5, style=NOTES) == eval_examples(40, seed=5, style=NOTES)
    assert eval_examples(40, seed=5, style=NOTES) != eval_examples(40, seed=6, style=NOTES)
    first, again = (make_example(random.Random("train"), Style(), "train", 10) for _ in range(2))
    assert first == again
    assert CORPUS_FILE.read_text(encoding="utf-8") == demo_corpus()


@pytest.mark.parametrize("kind", NAMED_KINDS)
def test_values_of_the_two_halves_are_disjoint(kind: str) -> None:
    seen = {split: {Maker(random.Random(i), split).value(kind) for i in range(3000)} for split in ("train", "held_out")}
    assert not seen["train"] & seen["held_out"]
    assert len(seen["held_out"]) > 20


def test_parts_of_held_out_names_are_all_trained() -> None:
    for heads, tails in (*HEADS_AND_TAILS.values(), *PLAIN_PAIRS.values()):
        assert all(not all(is_held_out(head, tail) for tail in range(len(tails))) for head in range(len(heads)))
        assert all(not all(is_held_out(head, tail) for head in range(len(heads))) for tail in range(len(tails)))


def test_templates_of_the_two_halves_are_disjoint() -> None:
    for name, attribute in ATTRIBUTES.items():
        assert statement_templates(name, "held_out")
        assert not set(statement_templates(name, "train")) & set(statement_templates(name, "held_out"))
        assert not set(question_templates(attribute.questions, "train")) & set(
            question_templates(attribute.questions, "held_out")
        )
    for comparison in COMPARISONS:
        assert question_templates(comparison.questions, "held_out")
        assert not set(question_templates(comparison.questions, "train")) & set(
            question_templates(comparison.questions, "held_out")
        )


def test_evaluation_contexts_are_long_and_hold_every_kind(held_out: list[Example]) -> None:
    assert sum(len(example.questions) for example in held_out) == 600
    assert all(len(example.chunks) >= 12 for example in held_out)
    assert value_of("I do not know") == "I do not know"
    kinds = [question.kind for example in held_out for question in example.questions]
    assert set(kinds) == set(NOTES.kinds)
    assert min(kinds.count(kind) for kind in NOTES.kinds) > 60


def test_comparisons_follow_from_two_facts() -> None:
    examples = eval_examples(60, seed=4, style=replace(NOTES, kinds=("comparison",)))
    for example in examples:
        for question in example.questions:
            support = [example.chunks[index] for index in question.support]
            pair, _, verdict = question.answer.partition(", so ")
            first, second = pair.split(" and ")
            values = [value_of(clause) for clause in (first, second)]
            assert all(any(value in chunk for chunk in support) for value in values)
            assert verdict == ("yes" if values[0] == values[1] else "no")
            # Both values have to be right, not the verdict alone.
            assert value_of(question.sentence) == question.answer == question.sentence.removesuffix(".")


def test_every_stage_with_contexts_makes_questions() -> None:
    for stage in STAGES:
        if stage.style is not None:
            rng = random.Random(stage.name)
            assert all(make_example(rng, stage.style, "train", 10).chunks for _ in range(5))


def test_the_demonstration_is_large_enough() -> None:
    documents, questions = demo_documents(), demo_questions()
    chunks = [chunk for document in documents for chunk in document.chunks]
    assert len(documents) >= 8
    assert len(chunks) >= 40
    assert len(questions) >= 10
    assert {question.kind for question in questions} == set(KINDS)
    assert all(document.title in document.chunks[0] for document in documents)
    assert all("\n" not in chunk for chunk in chunks)
    assert len(set(chunks)) == len(chunks)


def test_records_of_other_subtasks_are_not_made() -> None:
    with pytest.raises(ConfigError, match="'gov_report' cannot be made; choose one of hotpotqa, qmsum"):
        next(longbench_records("gov_report", 1))


def test_records_are_read_as_the_subtasks_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["longbench", "--out", str(tmp_path), "--questions", "11", "--seed", "3"])
    main()
    examples = eval_examples(11, 3, style=NOTES)
    asked = [(example, question) for example in examples for question in example.questions]
    assert len(asked) == 11 and len(examples) > 1
    for subtask, metric in zip(MADE_SUBTASKS, ("f1", "rouge_l"), strict=True):
        task = load_task("longbench", tmp_path, subtask=subtask, whole=True)
        assert next(iter(task.metrics)) == metric
        read = [(context, question) for context in task.contexts for question in context.questions]
        assert len(read) == len(asked)
        for (example, wanted), (context, question) in zip(asked, read, strict=True):
            assert question.text == wanted.text
            assert question.answers == ((wanted.answer,) if subtask == "hotpotqa" else (wanted.sentence,))
            if subtask == "hotpotqa":
                assert [text.partition("\n")[2] for text in context.texts] == list(example.chunks)
            else:
                assert context.texts == ("\n".join(example.chunks),)
        first = json.loads((tmp_path / f"{subtask}.jsonl").read_text().splitlines()[0])
        assert first["length"] == len(first["context"].split())


TOKENIZER = build_tokenizer()
LINES = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), min_size=1, max_size=5
)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


@settings(max_examples=200)
@given(LINES)
def test_pieces_cut_at_line_breaks_equal_the_whole(lines: list[str]) -> None:
    whole = ids("\n".join(lines))
    before = [token for number, line in enumerate(lines) for token in ids(line if number == 0 else "\n" + line)]
    after = [token for number, line in enumerate(lines) for token in ids(line + "\n" * (number + 1 < len(lines)))]
    assert whole == before == after


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


def test_a_line_break_is_always_a_token_of_its_own() -> None:
    assert len(ids("\n\n\n")) == 3
    assert ids("a\n\nb") == [*ids("a"), *ids("\n") * 2, *ids("b")]


def test_the_vocabulary_stays_small_and_has_its_special_tokens() -> None:
    assert len(TOKENIZER) <= 2048
    special = [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id]
    assert None not in special
    assert len(set(special)) == 3


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_one_bos_and_safe_borders(name: str) -> None:
    form = FORMATS[name]
    chunks, question = ["Marta Harsen lives in Ashford.", "She keeps a grey goat."], "Where does Marta Harsen live?"
    rendered = form.render(chunks, question)
    pieces = [form.prefix(), chunks[0], form.separator, chunks[1], form.suffix(question)]
    assert ids(rendered) == [token for piece in pieces for token in ids(piece)]
    assert ids(rendered).count(TOKENIZER.bos_token_id) == 1
    assert ids(rendered)[0] == TOKENIZER.bos_token_id


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_formats_are_what_the_chat_template_renders(system: str | None) -> None:
    inner = FORMATS["llama_index"]
    messages = [{"role": "user", "content": inner.render(["A.", "B."], "C?").removeprefix(BOS)}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat(inner, system).render(["A.", "B."], "C?")
    assert rendered.count(BOS) == 1


def test_a_finished_turn_ends_with_eos() -> None:
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == f"{BOS}{USER}\nA?\n{ASSISTANT}\nB.</s>\n"


def test_a_saved_tokenizer_is_loaded_by_transformers(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded("Marta\n keeps", add_special_tokens=False)["input_ids"] == ids("Marta\n keeps")
