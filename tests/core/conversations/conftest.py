"""Engines that know the chunks of these chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from tests.core.conversations.chats import CHUNKS, MakeEngine
from tests.families import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def make_engine(model: PreTrainedModel) -> Iterator[MakeEngine]:
    engines: list[BlendEngine] = []

    def make(model: PreTrainedModel = model, store: Any = None, **values: Any) -> BlendEngine:
        settings = {"strict": True, "self_check": False, "selector": "hkvd", "recompute_ratio": 0.15} | values
        engines.append(BlendEngine(model, tiny_tokenizer(), **engine_settings(**settings), store=store))
        engines[-1].add(CHUNKS)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
