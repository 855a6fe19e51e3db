"""The two real models, from the packages that carry them."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cacheblend_gguf import GGUFEngine
from integrations.gguf.tests.kit import gemma, smollm

pytest.importorskip("llama_cpp")


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_read_once() -> Iterator[None]:
    """Read each file's tokenizer once: 262,000 tokens take transformers 20 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_gguf.engine.AutoTokenizer.from_pretrained", cache(AutoTokenizer.from_pretrained))
        yield


@pytest.fixture(scope="session", params=[smollm, gemma], ids=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield request.param(Path(folder))


@pytest.fixture(scope="session")
def engine(path: Path) -> Iterator[GGUFEngine]:
    with GGUFEngine.from_pretrained(path, n_ctx=2048, n_threads=2) as engine:
        yield engine
