"""Many prompts answered together are answered as one after the other, down to the logits."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

from cacheblend_attachments import Repair, SnapKV
from cacheblend_lab import families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(5 + 6 * number, number), f"c{number}") for number in range(6)]
# Of the scale of the logits. Summing in another order, as a batch does, changes the last digits.
TOLERANCE = 2e-5


_model = cache(tiny_model)


def engine_of(family: str = "llama", attention: str = "sdpa", **values: Any) -> BlendEngine:
    settings = engine_settings(**{"self_check": False} | values)
    return BlendEngine(_model(family, attention), tiny_tokenizer(), **settings)


def some_prompts(count: int = 6) -> list[BlendPrompt]:
    """Prompts of different lengths, of 0 to 3 chunks each."""
    return [
        BlendPrompt(
            words(3 + number, 50 + number),
            [CHUNKS[(number + place) % len(CHUNKS)] for place in range(number % 4)],
            words(2 + 3 * number, 90 + number),
        )
        for number in range(count)
    ]


class Recorder(LogitsProcessor):
    """Notes the logits behind every sequence of ids that it is shown."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (ids,) = input_ids.tolist()
        self.logits[tuple(ids)] = scores[0].clone()
        return scores


# Greedy, but for what is drawn of one candidate.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 3.0},
    {"min_new_tokens": 6, "eos_token_id": [2, 13, 41, 77]},
    {"eos_token_id": list(range(3, 30))},
    {"bad_words_ids": [[number] for number in range(3, 40)], "suppress_tokens": [41, 42]},
    {"do_sample": True, "temperature": 0.7, "top_k": 1},
]


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("mistral", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3", "sdpa"),
        ("qwen3-moe", "sdpa"),
        ("gpt-neox", "eager"),
        ("smollm3", "sdpa"),
    ],
)
@settings(max_examples=4)
@given(data=st.data())
def test_any_prompts_are_answered_as_one_by_one(family: str, attention: str, data: st.DataObject) -> None:
    stored = data.draw(st.sets(st.sampled_from(range(len(CHUNKS)))))
    parts = st.lists(st.sampled_from(CHUNKS), max_size=4)
    drawn = data.draw(st.lists(st.tuples(parts, st.integers(1, 40), st.integers(0, 99)), min_size=2, max_size=5))
    prompts = [BlendPrompt(words(2, seed), chunks, words(length, seed)) for chunks, length, seed in drawn]
    # One with places of its own.
    prompts.append(BlendPrompt(segments=[words(3, 7), CHUNKS[2], words(9, 3)], positions=[5, 20, 100]))

    many, alone = Recorder(), Recorder()
    options = {"do_sample": False} | data.draw(st.sampled_from(OPTIONS))
    with engine_of(family, attention) as engine:
        engine.add([CHUNKS[number] for number in sorted(stored)])
        together = engine.generate_many(prompts, 10, logits_processor=[many], **options)
    with engine_of(family, attention) as engine:
        engine.add([CHUNKS[number] for number in sorted(stored)])
        wanted = [engine.generate(prompt, 10, logits_processor=[alone], **options) for prompt in prompts]
    for field in ("token_ids", "text", "prompt_ids"):
        assert [getattr(result, field) for result in together] == [getattr(result, field) for result in wanted]
    assert {result.report.batch_size for result in together} == {len(prompts)}
    for ids, logits in alone.logits.items():
        allowed = logits.isfinite()
        assert torch.equal(many.logits[ids].isfinite(), allowed)
        difference = (many.logits[ids] - logits)[allowed]
        assert float(difference.norm() / logits[allowed].norm()) < TOLERANCE


class AfterSome(StoppingCriteria):
    """Ends an answer after a number of tokens that depends on the prompt; keeps a state, and knows no batches."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert input_ids.shape[0] == 1
        self.seen += 1
        return torch.tensor([self.seen >= 2 + int(input_ids[0, 1]) % 5])


def test_criteria_see_each_row_by_itself_and_each_prompt_may_have_its_own() -> None:
    prompts = some_prompts()
    with engine_of() as engine:
        together = engine.generate_many(prompts, 12, do_sample=False, stopping_criteria=[AfterSome()])
        wanted = [engine.generate(prompt, 12, do_sample=False, stopping_criteria=[AfterSome()]) for prompt in prompts]
        assert [result.token_ids for result in together] == [result.token_ids for result in wanted]
        assert len({len(result.token_ids) for result in together}) > 1
        for size in (None, 1):
            own = [[AfterSome()], [], [AfterSome(), AfterSome()]]
            results = engine.generate_many(
                prompts[:3], 12, batch_size=size, do_sample=False, eos_token_id=-1, stopping_criteria=own
            )
            assert all(each.seen > 0 for criteria in own for each in criteria)
            assert len(results[1].token_ids) == 12 > max(len(results[0].token_ids), len(results[2].token_ids))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "opt"])
def test_no_answer_passes_the_window_and_each_goes_as_far_as_it_may(family: str) -> None:
    model = families.tiny_model(families.tiny_config(family))
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(self_check=False)) as engine:
        assert engine.window is not None
        lengths = (*(engine.window - left for left in (12, 7, 1)), 40)
        prompts = [BlendPrompt(words(length - 1, length)) for length in lengths]
        results = engine.generate_many(prompts, 30, do_sample=False, eos_token_id=-1)
        wanted = [engine.generate(prompt, 30, do_sample=False, eos_token_id=-1) for prompt in prompts]
    assert [len(result.token_ids) for result in results] == [12, 7, 1, 30]
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]


@pytest.mark.parametrize(("room", "size", "sizes"), [(32_768, 3, {3, 1}), (32_768, 1, {1}), (1, None, {1})])
def test_more_prompts_than_fit_are_decoded_batch_after_batch(room: int, size: int | None, sizes: set[int]) -> None:
    prompts = some_prompts(7)
    with engine_of(decode_batch_tokens=room) as engine:
        results = engine.generate_many(prompts, 4, do_sample=False, batch_size=size)
        assert [result.token_ids for result in results] == [
            engine.generate(prompt, 4, do_sample=False).token_ids for prompt in prompts
        ]
        assert {result.report.batch_size for result in results} == sizes
        free = engine.generate_many(prompts, 4, do_sample=True, temperature=5.0, top_k=0, batch_size=size)
        assert [result.token_ids for result in free] != [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("attached", "options", "reason"),
    [
        (lambda: Repair(0.2), {}, "Repair"),
        (lambda: SnapKV(20), {}, "SnapKV"),
        (None, {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        (None, {"max_time": 60.0}, "max_time"),
    ],
)
def test_what_no_batch_can_do_is_done_one_by_one(attached: Any, options: dict[str, Any], reason: str) -> None:
    prompts = some_prompts()
    with engine_of() as engine:
        if attached is not None:
            engine.attach(attached())
        engine.add(CHUNKS)
        results = engine.generate_many(prompts, 6, do_sample=False, **options)
        wanted = [engine.generate(prompt, 6, do_sample=False, **options) for prompt in prompts]
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    for result in results:
        assert result.report.batch_size == 1
        assert reason in str(result.report.alone_reason)


def test_a_model_that_fails_in_a_batch_answers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(self_check=True) as engine:
        model = engine.model
        own = model.forward

        def deaf(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("attention_mask", None)
            return own(*args, **kwargs)

        monkeypatch.setattr(model, "forward", deaf)
        prompts = some_prompts()
        results = engine.generate_many(prompts, 4, do_sample=False)
        assert results[0].report.alone_reason is not None
        assert model.forward is deaf
        wanted = [engine.generate(prompt, 4, do_sample=False) for prompt in prompts]
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]


class Slow(StoppingCriteria):
    """Takes its time for each token."""

    def __init__(self) -> None:
        self.steps, self.begun = 0, threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        self.begun.set()
        time.sleep(0.01)
        return torch.tensor([False])


async def test_cancelling_ends_the_generation_at_the_next_token() -> None:
    slow = Slow()
    with engine_of() as engine:
        options = {"eos_token_id": -1, "stopping_criteria": [slow]}
        task = asyncio.create_task(engine.agenerate_many(some_prompts(3), 400, **options))
        assert await asyncio.to_thread(slow.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The model is free for who comes next.
        engine.generate(some_prompts(1)[0], 2, do_sample=False)
    assert slow.steps < 3 * 200


async def test_answers_on_a_loop_need_none_of_its_threads() -> None:
    executor, prompts, busy = ThreadPoolExecutor(1), some_prompts(2), threading.Event()
    asyncio.get_running_loop().set_default_executor(executor)
    executor.submit(lambda: busy.wait())
    with engine_of() as engine:
        try:
            said = engine.stream(prompts[0], 6, do_sample=False)
            # Who stops to wait for a piece leaves it to the next.
            waiting = asyncio.create_task(anext(said))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            pieces = [piece async for piece in said]
            one = await engine.stream(prompts[0], 6, do_sample=False).aresult()
            many = await engine.agenerate_many(prompts, 6, do_sample=False)
        finally:
            busy.set()
        wanted = [each.text for each in engine.generate_many(prompts, 6, do_sample=False)]
        assert "".join(pieces) == said.result().text == one.text == wanted[0]
        assert [each.text for each in many] == wanted


async def test_an_error_comes_to_every_reader() -> None:
    def broken(batch_id: int, input_ids: object) -> list[int]:
        raise ZeroDivisionError

    with engine_of() as engine:
        stream = engine.stream(BlendPrompt("Who?"), 3, prefix_allowed_tokens_fn=broken)
        for _ in range(2):
            for read in (lambda: anext(stream), stream.aresult, partial(asyncio.to_thread, stream.result)):
                with pytest.raises(ZeroDivisionError):
                    await read()
