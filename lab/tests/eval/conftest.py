"""An untrained model with the reference tokenizer, for tests of the evaluation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from tests.families import tiny_reader


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of four layers with the reference tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer()
    tiny_reader().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model_folder, **engine_settings(device="cpu")) as engine:
        yield engine
