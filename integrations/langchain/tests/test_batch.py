"""A batch is answered together, and every input of it is still a run of its own."""

import asyncio
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from transformers import LlamaForCausalLM, StoppingCriteria

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import PromptError, PromptTooLongError
from integrations.langchain.tests.asking import KINDS, Kind, text_of
from langchain_cacheblend import BlendLLM, ChatBlend
from tests import poison

TOKENS = 6
QUESTIONS = ["Who?", "Where is it?", "What is the goat called, and where does it live?", "And then?", "Why?"]


@pytest.fixture(autouse=True)
def _chunks(engine: BlendEngine, chunks: dict[str, str]) -> None:
    engine.add(Chunk(text, id) for id, text in chunks.items())


@pytest.fixture
def prompts(chunks: dict[str, str]) -> list[str]:
    texts = list(chunks.values())
    return ["\n\n".join([*texts[: number % 4], question]) for number, question in enumerate(QUESTIONS)]


class Calls:
    """What an engine was asked for: how many prompts at a time."""

    def __init__(self, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        many, one = engine.generate_many, engine.generate
        # The asynchronous form asks it too.
        monkeypatch.setattr(
            engine, "generate_many", lambda prompts, *more, **kw: self._note(len(prompts), many(prompts, *more, **kw))
        )
        monkeypatch.setattr(engine, "generate", lambda prompt, **kw: self._note(1, one(prompt, **kw)))

    def _note(self, size: int, result: Any) -> Any:
        self.sizes.append(size)
        return result


@pytest.fixture
def calls(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(engine, monkeypatch)


@KINDS
def test_a_batch_is_answered_as_one_by_one(kind: Kind, engine: BlendEngine, calls: Calls, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    wanted = [text_of(llm.invoke(prompt)) for prompt in prompts]
    calls.sizes.clear()
    assert [text_of(answer) for answer in llm.batch(prompts)] == wanted
    assert calls.sizes == [len(prompts)]
    assert [text_of(answer) for answer in asyncio.run(llm.abatch(prompts))] == wanted
    assert calls.sizes == [len(prompts)] * 2
    chain = ChatPromptTemplate.from_template("{text}") | llm | StrOutputParser()
    chained = [chain.invoke({"text": prompt}) for prompt in prompts]
    calls.sizes.clear()
    assert chain.batch([{"text": prompt} for prompt in prompts]) == chained
    assert calls.sizes == [len(prompts)]
    assert llm.batch([]) == asyncio.run(llm.abatch([])) == []
    assert text_of(llm.batch(prompts[:1])[0]) == wanted[0]


def test_generate_of_many_prompts_is_asked_once(engine: BlendEngine, calls: Calls, prompts: list[str]) -> None:
    llm = BlendLLM(engine=engine, max_tokens=TOKENS)
    wanted = [llm.invoke(prompt) for prompt in prompts]
    calls.sizes.clear()
    result = llm.generate(prompts)
    later = asyncio.run(llm.agenerate(prompts))
    assert calls.sizes == [len(prompts)] * 2
    for each in (result, later):
        assert [generations[0].text for generations in each.generations] == wanted
        assert {generations[0].generation_info["blend"]["batch_size"] for generations in each.generations} == {5}


class Runs(BaseCallbackHandler):
    """Notes the runs it is told of."""

    def __init__(self) -> None:
        self.begun: dict[uuid.UUID, list[str]] = {}
        self.ended: set[uuid.UUID] = set()
        self.failed: set[uuid.UUID] = set()

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: uuid.UUID, **kwargs: Any) -> None:
        self.begun[run_id] = kwargs.get("tags") or []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        self.begun[run_id] = kwargs.get("tags") or []

    def on_llm_end(self, response: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        self.ended.add(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        self.failed.add(run_id)


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_inputs_are_runs(kind: Kind, asynchronous: bool, engine: BlendEngine, calls: Calls, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    wanted = [text_of(llm.invoke(prompt)) for prompt in prompts]
    calls.sizes.clear()
    handler, ids = Runs(), [uuid.uuid4() for _ in prompts]
    configs = [{"callbacks": [handler], "run_id": id, "tags": [f"input {number}"]} for number, id in enumerate(ids)]
    inputs = [*prompts[:2], "far too long " * 2000, *prompts[3:]]

    def answer(**options: Any) -> list[Any]:
        if asynchronous:
            return asyncio.run(llm.abatch(inputs, configs, **options))
        return llm.batch(inputs, configs, **options)

    answers = answer(return_exceptions=True)
    assert isinstance(answers[2], PromptTooLongError)
    assert [text_of(each) for each in (*answers[:2], *answers[3:])] == [*wanted[:2], *wanted[3:]]
    assert calls.sizes == [4]
    assert handler.begun == {id: [f"input {number}"] for number, id in enumerate(ids)}
    assert handler.failed == {ids[2]}
    assert handler.ended == {*ids} - {ids[2]}
    with pytest.raises(PromptTooLongError):
        answer()


@KINDS
@pytest.mark.parametrize(("limit", "sizes"), [(2, [2, 2, 1]), (1, [1] * 5), (9, [5])])
def test_as_many_at_once(kind: Kind, limit: int, sizes: Any, engine: BlendEngine, calls: Calls, prompts: Any) -> None:
    llm = kind(engine=engine, max_tokens=2)
    llm.batch(prompts, {"max_concurrency": limit})
    assert sum(calls.sizes) == 5 and max(calls.sizes) == max(sizes)
    calls.sizes.clear()
    asyncio.run(llm.abatch(prompts, {"max_concurrency": limit}))
    assert sum(calls.sizes) == 5 and max(calls.sizes) == max(sizes)


@KINDS
def test_what_a_cache_has_is_not_waited_for(kind: Kind, engine: BlendEngine, calls: Calls, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS, cache=InMemoryCache())
    first = [text_of(answer) for answer in llm.batch(prompts[:3])]
    again = [text_of(answer) for answer in llm.batch(prompts)]
    assert again[:3] == first
    assert calls.sizes == [3, 2]
    assert [text_of(answer) for answer in asyncio.run(llm.abatch(prompts))] == again
    assert calls.sizes == [3, 2]


class AsksToo(BaseCallbackHandler):
    """A callback that asks the same model something else, while a batch is under way."""

    raise_error = True

    def __init__(self, llm: Any, prompt: str) -> None:
        self.llm = llm
        self.prompt = prompt
        self.answers: list[str] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.answers.append(text_of(self.llm.invoke(self.prompt, {"callbacks": []}, max_tokens=2)))

    on_chat_model_start = on_llm_start


@KINDS
def test_a_model_may_be_asked_inside_a_run(kind: Kind, engine: BlendEngine, calls: Calls, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    wanted = [text_of(llm.invoke(prompt)) for prompt in prompts]
    other = text_of(llm.invoke("Something else?", max_tokens=2))
    calls.sizes.clear()
    handler = AsksToo(llm, "Something else?")
    assert [text_of(answer) for answer in llm.batch(prompts, {"callbacks": [handler]})] == wanted
    assert handler.answers == [other] * 5
    assert sorted(calls.sizes) == [1, 1, 1, 1, 1, 5]


class Slow(StoppingCriteria):
    """Takes its time over each token, and says when it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.steps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.begun.set()
        self.steps.append(time.monotonic())
        time.sleep(0.01)
        return torch.tensor([False])


@KINDS
def test_a_cancelled_batch_frees_the_engine(kind: Kind, engine: BlendEngine, prompts: list[str]) -> None:
    slow = Slow()
    llm = kind(engine=engine, max_tokens=1000, generation_kwargs={"stopping_criteria": [slow], "eos_token_id": -1})

    async def cancel() -> None:
        task = asyncio.create_task(llm.abatch(prompts))
        await asyncio.get_running_loop().run_in_executor(None, slow.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert len(slow.steps) < 1000


def test_an_engines_error_reaches_all(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, prompts: list[str]) -> None:
    llm = BlendLLM(engine=engine)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the machine is tired")

    monkeypatch.setattr(engine, "generate_many", fail)
    answers = llm.batch(prompts, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the machine is tired"] * 5


class Begins(BaseCallbackHandler):
    """Does something when a run begins, in the thread of that run, and gives the caller's thread time to see to it."""

    def __init__(self, act: Callable[[str], None] = lambda prompt: None) -> None:
        self._act = act

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self._act(prompts[0])
        time.sleep(0.3)

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.on_llm_start(serialized, [str(messages[0][0].content)])


TOO_LONG = "word " * 3000


@pytest.mark.timeout(120, method="thread")
@KINDS
@pytest.mark.parametrize("chained", [False, True])
def test_a_failed_run_leaves_none_waiting(kind: Kind, chained: bool, engine: BlendEngine, prompts: list[str]) -> None:
    llm: Any = kind(engine=engine, max_tokens=TOKENS)
    asked: list[Any] = [TOO_LONG, prompts[0], TOO_LONG, *prompts]
    if chained:
        llm = ChatPromptTemplate.from_template("{text}") | llm | StrOutputParser()
        asked = [{"text": each} for each in asked]
    runs = Runs()
    with pytest.raises(PromptTooLongError):
        llm.batch(asked, {"max_concurrency": 2, "callbacks": [runs, Begins()]})
    # Those that had begun were ended.
    assert len(runs.ended) >= 1
    assert runs.ended | runs.failed >= set(runs.begun)
    assert len(runs.begun) < len(asked)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_batch_ends(engine: BlendEngine, prompts: list[str]) -> None:
    def interrupt(prompt: str) -> None:
        if TOO_LONG[:100] in prompt:
            # Python does not wait for a thread whose start was interrupted.
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    llm = BlendLLM(engine=engine, max_tokens=TOKENS)
    runs = Runs()
    config = {"max_concurrency": 2, "callbacks": [runs, Begins(interrupt)]}
    with pytest.raises(KeyboardInterrupt):
        llm.batch([prompts[0], TOO_LONG, *prompts], config, return_exceptions=True)
    assert (len(runs.begun), len(runs.ended), len(runs.failed)) == (2, 0, 2)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_batch_is_not_answered_to_its_end(engine: BlendEngine, prompts: list[str]) -> None:
    class Interrupts(StoppingCriteria):
        steps = 0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.steps += 1
            if self.steps == 1:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.01)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    interrupts = Interrupts()
    options = {"stopping_criteria": [interrupts], "eos_token_id": -1}
    llm = ChatBlend(engine=engine, max_tokens=1000, generation_kwargs=options)
    runs = Runs()
    with pytest.raises(KeyboardInterrupt):
        llm.batch(prompts, {"callbacks": [runs]}, return_exceptions=True)
    assert interrupts.steps < 1000
    assert (len(runs.ended), len(runs.failed)) == (0, len(prompts))


@KINDS
@poison.COUNTS
@pytest.mark.parametrize("is_async", [False, True])
def test_nobody_is_hurt_by_what_another_asks(tiny: LlamaForCausalLM, kind: Kind, count: int, is_async: bool) -> None:
    with BlendEngine(tiny, poison.spare_token(load_tokenizer()), **engine_settings(self_check=False)) as engine:
        llm: Any = kind(engine=engine, max_tokens=TOKENS, temperature=0)
        wanted = {each: text_of(llm.invoke(each)) for each in QUESTIONS}
        failing = "Why # of all?"
        bad = [*poison.TEXTS.values(), failing]
        asked = [bad[n // 8 % 4] if n % 8 == 3 else QUESTIONS[n % 5] for n in range(count)]
        with poison.failing_on(engine.model, engine.tokenizer("#")["input_ids"][-1]):
            made = (llm.abatch if is_async else llm.batch)(asked, return_exceptions=True)
            answers = asyncio.run(made) if is_async else made
        for text, each in zip(asked, answers, strict=True):
            if text in wanted:
                assert text_of(each) == wanted[text]
            else:
                assert isinstance(each, torch.OutOfMemoryError if text == failing else PromptError)
