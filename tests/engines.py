"""Engines of tiny models, each closed with its test."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.engine.backend import scheduler_of
from cacheblend_rag.preamble import default_preamble
from cacheblend_rag.store import KVStore
from tests.families import tiny_model, tiny_tokenizer

MakeEngine = Callable[..., BlendEngine]


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Make engines over a store, a folder or nothing; settings are a module's ``ENGINE``, and what is given by name."""
    with ExitStack() as made:

        def make(store: Any = None, model: Any = "llama", **settings: Any) -> BlendEngine:
            loaded = tiny_model(model) if isinstance(model, str) else model
            given = engine_settings(**(getattr(request.module, "ENGINE", {}) | settings))
            return made.enter_context(BlendEngine(loaded, tiny_tokenizer(), **given, store=store))

        yield make


def documents_of(engine: Any, ids: Sequence[str]) -> list[str | None]:
    """Return the document that each chunk is a piece of; None if it is of none, or unknown."""
    return [record and record.document for record in engine.records(ids)]


def store_of(engine: BlendEngine) -> KVStore:
    """Return the whole store of an engine, which engines hand out to nobody."""
    return engine._store


def preamble_of(engine: BlendEngine) -> tuple[int, ...]:
    """Return the tokens that chunks are encoded behind, if their KV can be moved."""
    wanted = engine.config.preamble
    text = default_preamble(engine.tokenizer) if wanted is None else wanted
    return engine.prompt_ids(BlendPrompt(segments=[text])) if text else (engine.tokenizer.bos_token_id,)


def separator_of(engine: BlendEngine) -> tuple[int, ...]:
    """Return the tokens that chunks are set off by."""
    return tuple(engine.tokenizer(engine.config.separator, add_special_tokens=False)["input_ids"])


@contextmanager
def busy(engine: BlendEngine) -> Iterator[Callable[[int], None]]:
    """Keep the model from the calls made within the block; yields what waits until so many of them stand in line."""
    scheduler = scheduler_of(engine.model)

    def until(count: int) -> None:
        while len(scheduler.queue) < count:
            time.sleep(0.001)

    with scheduler:
        yield until


def evict(engine: BlendEngine, *ids: str) -> None:
    """Drop the KV of chunks, which keep their names."""
    for record in engine.records(list(ids)):
        for key in () if record is None else record.keys:
            store_of(engine).discard(key)


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    return make_engine()
