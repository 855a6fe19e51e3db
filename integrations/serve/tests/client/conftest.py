"""A server over a tiny random Llama, its engine, and the same engine as clients have it."""

from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM

from cacheblend_rag import BlendEngine
from cacheblend_serve.client.engine import ServedEngine
from integrations.serve.tests.conftest import engine_of, serving
from tests.families import tiny_reader


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    return tiny_reader(eos_token_id=None)


@pytest.fixture
def engine(tiny: LlamaForCausalLM) -> Iterator[BlendEngine]:
    with engine_of(tiny) as engine:
        yield engine


@pytest.fixture
def address(engine: BlendEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture
def served(address: str) -> Iterator[ServedEngine]:
    with ServedEngine(address) as served:
        yield served
