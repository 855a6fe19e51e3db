"""Readers of what a thread makes: in threads, and on event loops, where waiting takes none."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendPrompt
from cacheblend_rag.engine.background import Feed
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.errors import ConfigError
from tests.core.test_many import engine_of, some_prompts
from tests.store.kit import start_with_pipe


def _made(pieces: list[int], error: Exception | None = None, go_on: threading.Event | None = None) -> Feed[int, str]:
    feed: Feed[int, str] = Feed()

    def work() -> str:
        if go_on is not None:
            go_on.wait(60)
        for piece in pieces:
            feed.put(piece)
        if error is not None:
            raise error
        return "whole"

    feed.start(work, "made")
    return feed


@settings(max_examples=20)
@given(st.lists(st.integers(), max_size=20), st.booleans(), st.booleans())
def test_pieces_come_in_order_and_then_the_outcome(pieces: list[int], by_loop: bool, fails: bool) -> None:
    feed = _made(pieces, ConfigError("wrong") if fails else None)

    async def read() -> list[int]:
        seen = []
        while (piece := await feed.anext()) is not None:
            seen.append(piece)
        return seen

    assert (asyncio.run(read()) if by_loop else list(iter(feed.next, None))) == pieces
    assert feed.next() is None
    for _ in range(2):
        for outcome in (feed.outcome, lambda: asyncio.run(feed.aoutcome())):
            if fails:
                with pytest.raises(ConfigError, match="wrong"):
                    outcome()
            else:
                assert outcome() == "whole"


@pytest.mark.parametrize("loop_ends", [False, True])
def test_a_reader_that_is_cancelled_leaves_its_piece_to_the_next(loop_ends: bool) -> None:
    go_on = threading.Event()
    feed = _made([1], go_on=go_on)

    async def begin() -> Coroutine[Any, Any, int | None]:
        if loop_ends:
            reader = feed.anext()
            reader.send(None)
            return reader
        task = asyncio.create_task(feed.anext())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return feed.anext()

    left = asyncio.run(begin())
    go_on.set()
    assert (feed.next(), feed.outcome()) == (1, "whole")
    left.close()


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
            pieces = [piece async for piece in said]
            one = await engine.stream(prompts[0], 6, do_sample=False).aresult()
            many = await engine.agenerate_many(prompts, 6, do_sample=False)
        finally:
            busy.set()
        assert "".join(pieces) == said.result().text == one.text == engine.generate(prompts[0], 6, do_sample=False).text
        assert [e.token_ids for e in many] == [e.token_ids for e in engine.generate_many(prompts, 6, do_sample=False)]

        def broken(batch_id: int, input_ids: object) -> list[int]:
            raise ValueError("no token is allowed")

        stream = engine.stream(BlendPrompt("Who?"), 3, prefix_allowed_tokens_fn=broken)
        with pytest.raises(ValueError, match="allowed"):
            async for _ in stream:
                pass
        with pytest.raises(ValueError, match="allowed"):
            await stream.aresult()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _count(pipe: Connection) -> None:
    torch.set_num_threads(3)
    lock, counts, before = Scheduler(), list[int](), _threads()

    def compute() -> None:
        with lock, lock:
            torch.ones(1 << 20).sum()
            counts.append(_threads() - before)

    def left() -> int:
        # Workers are told to end, not waited for.
        until = time.monotonic() + 10
        while _threads() > before and time.monotonic() < until:
            time.sleep(0.01)
        return _threads() - before

    compute()
    after = left()
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    compute()
    pipe.send([*counts, after, left()])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_who_leaves_the_model_leaves_no_workers() -> None:
    process, pipe = start_with_pipe(_count)
    # Two workers while it computes, in another thread beside that one; none afterwards.
    assert pipe.recv() == [2, 3, 2, 0, 0]
    process.join()
