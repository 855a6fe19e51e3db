"""Calls that come at the same time are answered as if each had come alone, those that had to wait in one batch."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError, PromptError
from tests import poison
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(6 + 5 * number, number), f"c{number}") for number in range(5)]
PROMPTS = [BlendPrompt(words(3, 5), [CHUNKS[(n + i) % 5] for i in range(n % 4)], words(2 + 3 * n, 7)) for n in range(7)]


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    engine = make_engine(self_check=False)
    engine.add(CHUNKS)
    return engine


@contextmanager
def busy(engine: BlendEngine) -> Iterator[Callable[[int], None]]:
    """Keep the model from the calls made within the block; yields what waits until so many of them stand in line."""

    def until(count: int) -> None:
        while len(engine._runner.scheduler.line()) < count:
            time.sleep(0.001)

    with engine._runner.scheduler:
        yield until


def together(engine: BlendEngine, calls: Sequence[Callable[[], Any]], pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Make calls that wait for the model in this order."""
    made = []
    with busy(engine) as until:
        for number, call in enumerate(calls, 1):
            made.append(pool.submit(call))
            until(number)
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def answer(engine: BlendEngine, prompt: BlendPrompt, tokens: int = 9, **options: Any) -> Callable[[], GenerationResult]:
    return lambda: engine.generate(prompt, tokens, do_sample=False, **options)


def test_calls_that_wait_are_one_batch(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    wanted = [answer(engine, prompt)() for prompt in PROMPTS]
    assert {each.report.batch_size for each in wanted} == {1}
    found = [each.result() for each in together(engine, [answer(engine, prompt) for prompt in PROMPTS], pool)]
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.text for each in found] == [each.text for each in wanted]
    assert [each.report.batch_size for each in found] == [7] * 7
    assert [each.report.hits for each in found] == [each.report.hits for each in wanted]
    # A call that finds the model free is answered alone again.
    assert answer(engine, PROMPTS[0])().report.batch_size == 1
    assert not engine._runner.scheduler.line()


def test_only_what_is_decoded_alike_is_decoded_together(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    calls = [
        answer(engine, PROMPTS[0]),
        answer(engine, PROMPTS[1]),
        answer(engine, PROMPTS[2], repetition_penalty=2.0),
        # What is None says nothing.
        answer(engine, PROMPTS[3], tokens=3, stopping_criteria=None, logits_processor=None, num_beams=None),
        answer(engine, PROMPTS[4], blend=BlendConfig(recompute_ratio=0.3, selector="random")),
        answer(engine, PROMPTS[5], repetition_penalty=2.0),
        answer(engine, PROMPTS[6], no_repeat_ngram_size=9),
    ]
    wanted = [call().token_ids for call in calls]
    found = [each.result() for each in together(engine, calls, pool)]
    assert [each.token_ids for each in found] == wanted
    assert [each.report.batch_size for each in found] == [4, 4, 2, 4, 4, 2, 1]


def test_a_batch_keeps_the_budget(make_engine: MakeEngine, pool: ThreadPoolExecutor) -> None:
    engine = make_engine(self_check=False, decode_batch_tokens=150)
    calls = [answer(engine, BlendPrompt(words(40, number)), 10) for number in range(8)]
    found = [each.result() for each in together(engine, calls, pool)]
    # Three of 51 tokens with their answers are more than 150.
    assert [each.report.batch_size for each in found] == [2] * 8


def test_who_waits_too_long_is_told_while_answers_go_on(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    with busy(engine) as until:
        first = pool.submit(answer(engine, PROMPTS[0]))
        until(1)
        late = pool.submit(answer(engine, PROMPTS[1], wait_s=0.05))
        with pytest.raises(AnswerTimeoutError, match="the model was busy with other calls"):
            late.result()
        assert len(engine._runner.scheduler.line()) == 1
    assert first.result().report.batch_size == 1

    class Slow(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            time.sleep(0.25)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    slow = [answer(engine, PROMPTS[0]), answer(engine, PROMPTS[1], 6, wait_s=1.0, stopping_criteria=[Slow()])]
    assert len(together(engine, slow, pool)[1].result().token_ids) == 6


def test_what_waits_when_the_engine_is_closed_is_refused(pool: ThreadPoolExecutor) -> None:
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(self_check=False))
    with busy(engine) as until:
        closing = pool.submit(engine.close)
        until(1)
        calls = [pool.submit(answer(engine, PROMPTS[number])) for number in range(3)]
        until(4)
    closing.result()
    assert all("closed before the prompt's turn came" in str(call.exception()) for call in calls)


def test_a_stream_that_is_closed_ends_alone(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    wanted = [answer(engine, prompt, 60, eos_token_id=-1)() for prompt in PROMPTS[:4]]

    def first_piece() -> GenerationResult:
        stream = engine.stream(PROMPTS[2], 60, do_sample=False, eos_token_id=-1)
        next(stream)
        stream.close()
        return stream.result()

    calls = [answer(engine, prompt, 60, eos_token_id=-1) for prompt in PROMPTS[:4]]
    calls[2] = first_piece
    found = [each.result() for each in together(engine, calls, pool)]
    closed = found.pop(2)
    assert [each.token_ids for each in found] == [wanted[number].token_ids for number in (0, 1, 3)]
    assert 1 <= len(closed.token_ids) < 60
    assert closed.token_ids == wanted[2].token_ids[: len(closed.token_ids)]
    assert closed.report.batch_size == 4


def test_a_call_that_is_given_up_while_it_waits_is_not_computed(engine: BlendEngine) -> None:
    with busy(engine) as until:
        first = engine.stream(PROMPTS[0], 5, do_sample=False)
        until(1)
        streams = [engine.stream(PROMPTS[1], 5, do_sample=False) for _ in range(3)]
        until(4)
        streams[1].close()
        # Its thread does not wait for the model any longer.
        with pytest.raises(CacheBlendError, match="cancelled before it began"):
            streams[1].result()
        assert len(engine._runner.scheduler.line()) == 3
    assert [len(stream.result().token_ids) for stream in (first, streams[0], streams[2])] == [5, 5, 5]


@pytest.mark.parametrize(("step", "failing"), [("together", 1), ("_solo_reason", 3)])
def test_a_batch_that_fails_is_begun_anew_without_its_first(
    engine: BlendEngine, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step: str, failing: int
) -> None:
    calls = [answer(engine, prompt) for prompt in PROMPTS[:4]]
    own, asked = getattr(engine._many, step), list[Any]()

    def fail_once(given: Any) -> Any:
        asked.append(given)
        if len(asked) == failing:
            raise KeyboardInterrupt
        return own(given)

    monkeypatch.setattr(engine._many, step, fail_once)
    made = together(engine, calls, pool)
    with pytest.raises(KeyboardInterrupt):
        made[0].result(timeout=60)
    assert [each.result(timeout=60).token_ids for each in made[1:]] == [call().token_ids for call in calls[1:]]
    assert step != "together" or len(asked[0]) == 4


@poison.COUNTS
def test_nobody_is_hurt_by_what_another_asks(make_engine: MakeEngine, count: int) -> None:
    engine = make_engine(self_check=False)
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
        elif number % 8 == 5:
            calls.append(lambda prompt=prompt: engine.stream(prompt, 9, do_sample=False).result())
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


def test_an_answer_may_ask_something_itself(engine: BlendEngine, pool: ThreadPoolExecutor) -> None:
    asked: list[tuple[int, ...]] = []

    class Asking(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            asked.append(answer(engine, PROMPTS[1], 2)().token_ids)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    calls = [answer(engine, PROMPTS[number], 3, stopping_criteria=[Asking()]) for number in (0, 3)]
    found = [each.result(timeout=60) for each in together(engine, calls, pool)]
    assert [len(each.token_ids) for each in found] == [3, 3]
    assert asked == [answer(engine, PROMPTS[1], 2)().token_ids] * 6


CALLS = st.tuples(st.integers(0, 6), st.integers(1, 12), st.sampled_from([1.0, 2.0]), st.booleans())


@settings(max_examples=6)
@given(st.lists(CALLS, min_size=2, max_size=10))
def test_any_company_changes_no_answer(drawn: list[tuple[int, int, float, bool]]) -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(self_check=False)) as engine:
        engine.add(CHUNKS[:3])

        def ask(number: int, tokens: int, penalty: float, streams: bool) -> tuple[int, ...]:
            options: dict[str, Any] = {"do_sample": False, "repetition_penalty": penalty}
            if not streams:
                return engine.generate(PROMPTS[number], tokens, **options).token_ids
            stream = engine.stream(PROMPTS[number], tokens, **options)
            assert "".join(stream) == stream.result().text
            return stream.result().token_ids

        wanted = [ask(*each) for each in drawn]
        with ThreadPoolExecutor(len(drawn)) as pool:
            assert list(pool.map(lambda each: ask(*each), drawn)) == wanted
        assert not engine._runner.scheduler.line()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_an_engine_of_its_own(engine: BlendEngine) -> None:
    wanted = answer(engine, PROMPTS[1])().token_ids
    with busy(engine):
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            try:
                answer(engine, PROMPTS[1])()
            except ConfigError as error:
                with BlendEngine(engine.model, engine.tokenizer, **engine_settings(self_check=False)) as own:
                    os._exit("forked" not in str(error) or answer(own, PROMPTS[1])().token_ids != wanted)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
