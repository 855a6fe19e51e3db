"""Engines of tiny models, each closed with its test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
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


def evict(engine: BlendEngine, *ids: str) -> None:
    """Drop the KV of chunks, which keep their names."""
    for record in engine.records(list(ids)):
        assert record is not None
        for key in record.keys:
            engine._store.discard(key)


def damage(file: Path) -> None:
    """Change a bit of a chunk file's last bytes, which are those of its last layer."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x10
    file.write_bytes(content)


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    return make_engine()
