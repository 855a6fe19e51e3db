"""The two real models, from the packages that carry them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_gguf import GGUFEngine
from cacheblend_rag import EngineConfig
from integrations.gguf.tests.kit import gemma, smollm

pytest.importorskip("llama_cpp")

# Of tests on both models, those whose outcome depends on Gemma's sliding windows; the others are on Gemma at full counts.
_ON_GEMMA = (
    "test_chunks_are_put_together_as_llama_cpp_reads_them",
    "test_any_order_of_hits_and_misses",
    "test_answers_are_those_of_an_engine_without_sharing",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[gemma3" in item.name and not item.name.startswith(_ON_GEMMA):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session", params=[smollm, gemma], ids=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield request.param(Path(folder))


@pytest.fixture(scope="session")
def engine(path: Path) -> Iterator[GGUFEngine]:
    # What is asked twice is computed twice, unless a test is about that.
    config = EngineConfig(prefix_bytes=0)
    with GGUFEngine.from_pretrained(path, n_ctx=2048, config=config) as engine:
        yield engine
