"""Generated evaluations: every answer stands in the text, lengths are kept, and a seed decides everything."""

import re
from collections import Counter
from functools import cache
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cacheblend_lab.eval.generated import NEEDLE_ACROSS, RULER_SUBTASKS, needle_task, ruler_task
from cacheblend_lab.eval.task import EvalContext
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag.errors import ConfigError

ALL_SUBTASKS = (*RULER_SUBTASKS, NEEDLE_ACROSS)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


def tokens(text: str, counted_by: PreTrainedTokenizerFast | None = None) -> int:
    return len((counted_by or tokenizer())(text, add_special_tokens=False)["input_ids"])


def one(subtask: str, context_tokens: int = 1024, chunk_tokens: int = 128, seed: int = 0) -> EvalContext:
    sizes = {"num_questions": 1, "context_tokens": context_tokens, "chunk_tokens": chunk_tokens}
    task = ruler_task(tokenizer(), subtasks=[subtask], seed=seed, **sizes)
    (context,) = task.contexts
    return context


def text_of(context: EvalContext) -> str:
    return " ".join(context.texts)


@settings(max_examples=25)
@given(
    subtask=st.sampled_from(ALL_SUBTASKS),
    context_tokens=st.integers(900, 4096),
    chunk_tokens=st.integers(100, 600),
    seed=st.integers(0, 10**6),
)
def test_texts_are_full_and_hold_the_answers(subtask: str, context_tokens: int, chunk_tokens: int, seed: int) -> None:
    sizes = {"num_questions": 2, "context_tokens": context_tokens, "chunk_tokens": chunk_tokens}
    task = ruler_task(tokenizer(), subtasks=[subtask], seed=seed, **sizes)
    assert task.chunked
    assert len({context.questions[0].id for context in task.contexts}) == 2
    for context in task.contexts:
        sizes = [tokens(text) for text in context.texts]
        # The longest unit, two UUIDs in a sentence, has up to 90 tokens in this tokenizer.
        assert max(sizes) <= chunk_tokens and context_tokens - 100 <= sum(sizes) <= context_tokens
        (question,) = context.questions
        assert question.kind == subtask
        assert question.answers
        for answer in question.answers:
            assert any(answer in text for text in context.texts), "an answer is cut by a chunk border"
            assert answer not in question.text
        assert task.max_new_tokens >= tokens(", ".join(question.answers))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**40), subtask=st.sampled_from(ALL_SUBTASKS))
def test_a_seed_decides_everything(seed: int, subtask: str) -> None:
    assert one(subtask, seed=seed) == one(subtask, seed=seed)
    assert one(subtask, seed=seed) != one(subtask, seed=seed + 1)


@pytest.mark.parametrize(
    ("subtask", "needles", "answers"),
    [
        *((f"niah_single_{number}", 1, 1) for number in (1, 2, 3)),
        ("niah_multikey_1", 4, 1),
        *((f"niah_multikey_{number}", None, 1) for number in (2, 3)),
        ("niah_multiquery", 4, 4),
        ("niah_multivalue", 4, 4),
    ],
)
def test_as_many_needles_as_ruler_hides(subtask: str, needles: int | None, answers: int) -> None:
    context = one(subtask)
    found = re.findall(r"A secret (?:number|code) of (\S+) is (\S+)\.", text_of(context))
    (question,) = context.questions
    # Some haystacks are needles.
    assert len(found) == needles or (needles is None and len(found) == len({key for key, _ in found}) > 8)
    assert len(question.answers) == answers
    assert {value for key, value in found if key in question.text} == set(question.answers)


def test_the_common_words_are_the_ten_most_common() -> None:
    context = one("cwe", context_tokens=4096)
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)", text_of(context)), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    ranked = Counter(words).most_common()
    assert {word for word, _ in ranked[:10]} == set(context.questions[0].answers)
    assert ranked[9][1] >= 3 * ranked[10][1]


@pytest.mark.parametrize("context_tokens", [400, 1024, 4096])
def test_the_frequent_words_are_the_three_most_frequent(context_tokens: int) -> None:
    context = one("fwe", context_tokens=context_tokens)
    ranked = Counter(word for word in text_of(context).split() if word != "...").most_common()
    assert tuple(word for word, _ in ranked[:3]) == context.questions[0].answers
    assert ranked[2][1] > ranked[3][1]
    if context_tokens == 4096:  # Counts fall with the square of the rank, which is 2 for the first coded word.
        assert ranked[0][1] / ranked[2][1] == pytest.approx(16 / 4, rel=0.1)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), chunk_tokens=st.integers(60, 300))
def test_a_needle_across_a_border_has_its_value_in_the_next_chunk(seed: int, chunk_tokens: int) -> None:
    context = one(NEEDLE_ACROSS, chunk_tokens=chunk_tokens, seed=seed)
    (question,) = context.questions
    (value,) = question.answers
    keys = [re.search(r"Here is the secret number of (\S+)\.$", text) for text in context.texts]
    assert sum(key is not None for key in keys) == 4
    (place,) = [place for place, key in enumerate(keys) if key is not None and key[1] in question.text]
    assert context.texts[place + 1].startswith(f"It is {value}.")
    assert value not in context.texts[place]


def subject_of(question: str) -> str:
    """The key, or the person's name, that a question asks about."""
    found = re.search(r"[a-z]+-[a-z]+|[A-Z][a-z]+ [A-Z][a-z]+", question)
    assert found
    return found[0]


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), depth=st.floats(0, 1), chunk_tokens=st.integers(40, 200))
def test_a_fact_across_a_border_stands_behind_a_pronoun(seed: int, depth: float, chunk_tokens: int) -> None:
    sizes = {"depths": [depth], "lengths": [500], "num_per_cell": 1, "chunk_tokens": chunk_tokens}
    task = needle_task(tokenizer(), seed=seed, across=True, hidden="fact", **sizes)
    (context,) = task.contexts
    (question,) = context.questions
    person = subject_of(question.text)
    (place,) = [place for place, text in enumerate(context.texts) if person in text]
    assert person in context.texts[place].split(". ")[-1]
    first = context.texts[place + 1].split(". ")[0].removesuffix(".")
    assert first.startswith(("She ", "He "))
    assert first.endswith(question.answers[0])


@pytest.mark.parametrize("hidden", ["number", "fact"])
@pytest.mark.parametrize("across", [False, True])
def test_needles_stand_at_their_depth(across: bool, hidden: Literal["number", "fact"]) -> None:
    depths, lengths = (0, 0.3, 1.0), (800, 1600)
    task = needle_task(
        tokenizer(), depths=depths, lengths=lengths, num_per_cell=2, chunk_tokens=200, across=across, hidden=hidden
    )
    assert [context.questions[0].kind for context in task.contexts] == [
        f"{length} @ {depth:g}" for length in lengths for depth in depths for _ in range(2)
    ]
    assert len({context.questions[0].id for context in task.contexts}) == 12
    for context in task.contexts:
        (question,) = context.questions
        length, depth = question.kind.split(" @ ")
        text = text_of(context)
        # A value of the fictional world may be another's too; the needle's sentence is the one after the asked name.
        place = text.index(question.answers[0], text.index(subject_of(question.text)))
        # Other needles stand in the text too, where depths are counted without them.
        assert place / len(text) == pytest.approx(float(depth), abs=0.08)
        assert int(length) - 60 <= sum(map(tokens, context.texts)) <= int(length)
        assert max(map(tokens, context.texts)) <= 200


def test_what_cannot_be_generated_is_said() -> None:
    with pytest.raises(ConfigError, match=r"'niah_single_9'.*niah_single_1"):
        ruler_task(tokenizer(), subtasks=["niah_single_9"])
    with pytest.raises(ConfigError, match=r"chunk_tokens=10 is too small.*alone has"):
        ruler_task(tokenizer(), subtasks=["niah_single_2"], num_questions=1, chunk_tokens=10)
    with pytest.raises(ConfigError, match=r"context_tokens=50 is too small.*shortest text"):
        ruler_task(tokenizer(), subtasks=["niah_multivalue"], num_questions=1, context_tokens=50)
    with pytest.raises(ConfigError, match=r"depth 1\.5 is outside 0 to 1"):
        needle_task(tokenizer(), depths=[1.5])
