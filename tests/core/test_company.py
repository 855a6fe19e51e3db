"""Calls that come at the same time are answered as if each had come alone, those that had to wait in one batch."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.protocol import GenerationResult
from cacheblend_rag.errors import ConfigError, PromptError
from tests import poison
from tests.engines import MakeEngine, busy
from tests.families import tiny_tokenizer, words
from tests.limits import apart

ENGINE = {"self_check": False}
CHUNKS = [Chunk(words(6 + 5 * number, number), f"c{number}") for number in range(5)]
PROMPTS = [BlendPrompt(words(3, 5), [CHUNKS[(n + i) % 5] for i in range(n % 4)], words(2 + 3 * n, 7)) for n in range(7)]


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    engine = make_engine()
    engine.add(CHUNKS)
    return engine


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def together(engine: BlendEngine, calls: Sequence[Callable[[], Any]], pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Make calls that wait for the model in this order."""
    made = []
    with busy(engine) as until:
        for number, call in enumerate(calls, 1):
            made.append(pool.submit(call))
            until(number)
    return made


def answer(engine: BlendEngine, prompt: BlendPrompt, tokens: int = 9, **options: Any) -> Callable[[], GenerationResult]:
    return lambda: engine.generate(prompt, tokens, do_sample=False, **options)


# What is decoded alike is decoded together; what is None says nothing.
ALIKE: list[dict[str, Any]] = [
    {},
    {"stopping_criteria": None, "logits_processor": None, "num_beams": None},
    {"blend": BlendConfig(recompute_ratio=0.3, selector="random")},
]
OTHERS: list[dict[str, Any]] = [{"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 9}]
CALLS = st.tuples(
    st.integers(0, 6), st.integers(1, 12), st.sampled_from(ALIKE * 2 + OTHERS), st.sampled_from(["generate", "stream"])
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(CALLS, min_size=2, max_size=10))
def test_any_company_changes_no_answer(
    engine: BlendEngine, pool: ThreadPoolExecutor, drawn: list[tuple[int, int, dict[str, Any], str]]
) -> None:
    def ask(number: int, tokens: int, options: dict[str, Any], way: str) -> GenerationResult:
        if way == "generate":
            return engine.generate(PROMPTS[number], tokens, do_sample=False, **options)
        stream = engine.stream(PROMPTS[number], tokens, do_sample=False, **options)
        assert "".join(stream) == stream.result().text
        return stream.result()

    wanted = [ask(*each) for each in drawn]
    assert {each.report.batch_size for each in wanted} == {1}
    found = [each.result() for each in together(engine, [lambda each=each: ask(*each) for each in drawn], pool)]
    assert [(each.token_ids, each.text) for each in found] == [(each.token_ids, each.text) for each in wanted]
    assert [each.report.hits for each in found] == [each.report.hits for each in wanted]
    alike = [each.report.batch_size for each, call in zip(found, drawn, strict=True) if call[2] in ALIKE]
    assert alike == [len(alike)] * len(alike)


def test_a_batch_keeps_the_budget(make_engine: MakeEngine, pool: ThreadPoolExecutor) -> None:
    engine = make_engine(decode_batch_tokens=150)
    calls = [answer(engine, BlendPrompt(words(40, number)), 10) for number in range(8)]
    # Three of 51 tokens with their answers are more than 150.
    assert [each.result().report.batch_size for each in together(engine, calls, pool)] == [2] * 8


def test_what_waits_when_the_engine_is_closed_is_refused(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    with busy(engine) as until:
        closing = pool.submit(engine.close)
        until(1)
        calls = [pool.submit(answer(engine, PROMPTS[number])) for number in range(3)]
        until(4)
    closing.result()
    assert all(isinstance(call.exception(), ConfigError) for call in calls)


def test_a_stream_that_is_closed_ends_alone(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    calls = [answer(engine, prompt, 60, eos_token_id=-1) for prompt in PROMPTS[:4]]
    wanted = [call().token_ids for call in calls]

    def first_piece() -> GenerationResult:
        stream = engine.stream(PROMPTS[2], 60, do_sample=False, eos_token_id=-1)
        next(stream)
        stream.close()
        return stream.result()

    calls[2] = first_piece
    found = [each.result().token_ids for each in together(engine, calls, pool)]
    assert 1 <= len(found[2]) < 60
    assert found == [*wanted[:2], wanted[2][: len(found[2])], wanted[3]]


@poison.COUNTS
def test_nobody_is_hurt_by_what_another_asks(make_engine: MakeEngine, count: int) -> None:
    engine = make_engine()
    poison.spare_token(engine.tokenizer)
    engine.add(CHUNKS)
    # Each has a chunk of its own beside, so that misses are encoded together.
    fine = [
        BlendPrompt(segments=[*prompt.segments[:-1], Chunk(words(9, 20 + n)), prompt.segments[-1]])
        for n, prompt in enumerate(PROMPTS)
    ]
    wanted = [answer(engine, prompt)().token_ids for prompt in fine]
    bad = list(poison.prompts(engine.model.config.vocab_size).values())
    read = {each for prompt in fine for each in engine.prompt_ids(prompt)}
    large = next(each for each in range(3, 97) if each not in read)
    bad.append((BlendPrompt("t5", [Chunk(f"t3 t{large}")], "t6"), {}))
    calls: list[Callable[[], Any]] = []
    for number in range(max(count, 240)):
        prompt, options = bad[number // 8 % len(bad)] if number % 8 == 3 else (fine[number % len(fine)], {})
        if number % 8 == 4:
            # Closed before it was read.
            calls.append(lambda prompt=prompt: engine.stream(prompt, 9, do_sample=False).close())
        else:
            calls.append(answer(engine, prompt, **options))
    engine.store.clear()
    with poison.failing_on(engine.model, large):
        made = poison.outcomes(calls)
        failed: dict[int, Exception] = {}
        given = [*fine[:2], BlendPrompt(poison.BEYOND), bad[-1][0], *fine[2:]]
        answers = engine.generate_many(given, 9, do_sample=False, on_failed=failed.__setitem__)
    assert [each.token_ids for each in answers] == wanted
    assert {number: type(error) for number, error in failed.items()} == {2: PromptError, 3: torch.OutOfMemoryError}
    for number, each in enumerate(made):
        if number % 8 == 3:
            assert isinstance(each, Exception), number
        elif number % 8 != 4:
            assert isinstance(each, GenerationResult), (number, each)
            assert each.token_ids == wanted[number % len(fine)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_an_engine_of_its_own(engine: BlendEngine) -> None:
    wanted = answer(engine, PROMPTS[1])().token_ids

    def child() -> None:
        torch.set_num_threads(1)
        with pytest.raises(ConfigError):
            answer(engine, PROMPTS[1])()
        with BlendEngine(engine.model, tiny_tokenizer(), **engine_settings(self_check=False)) as own:
            assert answer(own, PROMPTS[1])().token_ids == wanted

    with busy(engine):
        assert os.waitpid(apart(child), 0)[1] == 0
