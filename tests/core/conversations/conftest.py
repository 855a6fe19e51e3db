"""Engines that know the chunks of these chats."""

from typing import Any

import pytest
from transformers import PreTrainedModel

from cacheblend_rag import BlendEngine
from tests.core.conversations.chats import CHUNKS
from tests.engines import MakeEngine
from tests.families import tiny_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def make_engine(make_engine: MakeEngine, model: PreTrainedModel) -> MakeEngine:
    def make(model: PreTrainedModel = model, store: Any = None, **values: Any) -> BlendEngine:
        settings = {"strict": True, "self_check": False, "selector": "hkvd", "recompute_ratio": 0.15} | values
        engine = make_engine(store, model, **settings)
        engine.add(CHUNKS)
        return engine

    return make
