"""The two real models, from the packages that carry them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_gguf import GGUFEngine
from cacheblend_rag import EngineConfig
from integrations.gguf.tests.kit import gemma, smollm

pytest.importorskip("llama_cpp")


@pytest.fixture(scope="session", autouse=True)
def kept_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have tokenizers kept for this session, here and in the processes that are started."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setattr("cacheblend_gguf.tokenizer._KEPT", folder / "cacheblend-gguf")
        yield folder / "cacheblend-gguf"


@pytest.fixture(scope="session", params=[smollm, gemma], ids=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield request.param(Path(folder))


@pytest.fixture(scope="session")
def engine(path: Path) -> Iterator[GGUFEngine]:
    # What is asked twice is computed twice, unless a test is about that.
    config = EngineConfig(prefix_bytes=0)
    with GGUFEngine.from_pretrained(path, n_ctx=2048, n_threads=2, config=config) as engine:
        yield engine
