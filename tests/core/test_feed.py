"""Answers on event loops, where waiting takes no thread of the loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cacheblend_rag import BlendPrompt
from tests.core.test_many import engine_of, some_prompts


async def test_answers_on_a_loop_need_none_of_its_threads() -> None:
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    busy = threading.Event()
    prompts = some_prompts(2)
    with engine_of() as engine:
        try:
            taken: Callable[[], object] = busy.wait
            executor.submit(taken)
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
        assert "".join(pieces) == said.result().text == one.text == engine.generate(prompts[0], 6, do_sample=False).text
        assert [e.token_ids for e in many] == [e.token_ids for e in engine.generate_many(prompts, 6, do_sample=False)]


async def test_an_error_comes_to_every_reader() -> None:
    def broken(batch_id: int, input_ids: object) -> list[int]:
        raise ValueError("no token is allowed")

    with engine_of() as engine:
        stream = engine.stream(BlendPrompt("Who?"), 3, prefix_allowed_tokens_fn=broken)
        with pytest.raises(ValueError, match="allowed"):
            async for _ in stream:
                pass
        for _ in range(2):
            with pytest.raises(ValueError, match="allowed"):
                await stream.aresult()
            with pytest.raises(ValueError, match="allowed"):
                stream.result()
