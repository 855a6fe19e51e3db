"""A tiny random Llama with the reference tokenizer, and what the LangChain tests say to it."""

import math
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from transformers import LlamaForCausalLM

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from tests.families import tiny_reader
from tests.limits import one_thread as one_thread

CHUNKS = {
    "mara": "Mara Lind was born in Oslo and moved north.",
    "works": "She works at the harbour as a rope maker.",
    "house": "Her house stands behind the old light tower.",
    "goat": "A striped goat called Pim lives there too.",
}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer()


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    return tiny_reader()


@pytest.fixture(scope="package")
def reference() -> Iterator[BlendEngine]:
    """The shipped model; what a test adds to it, other tests see."""
    with BlendEngine.from_pretrained("reference", **engine_settings(self_check=False)) as engine:
        yield engine


@pytest.fixture
def engine(tiny: LlamaForCausalLM, tokenizer: Any) -> Iterator[BlendEngine]:
    with BlendEngine(tiny, tokenizer, **engine_settings(self_check=False)) as engine:
        yield engine


class LetterCounts(Embeddings):
    """Embeds a text by how often each letter stands in it."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        # One more, so that a text without letters has a direction too.
        counts = [*(text.lower().count(letter) for letter in ascii_lowercase), 0.1]
        return [count / math.hypot(*counts) for count in counts]


@pytest.fixture
def embedding() -> Embeddings:
    return LetterCounts()


@pytest.fixture
def chunks() -> dict[str, str]:
    return dict(CHUNKS)
