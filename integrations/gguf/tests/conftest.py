"""The two real models, from the packages that carry them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_gguf import GGUFEngine
from integrations.gguf.tests.kit import gemma, smollm

pytest.importorskip("llama_cpp")


@pytest.fixture(scope="session", params=[smollm, gemma], ids=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield request.param(Path(folder))


@pytest.fixture(scope="session")
def engine(path: Path) -> Iterator[GGUFEngine]:
    with GGUFEngine.from_pretrained(path, n_ctx=2048, n_threads=2) as engine:
        yield engine
