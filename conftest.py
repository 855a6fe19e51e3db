"""What every test starts from: no network, no deadlines, no settings from the caller's environment."""

from __future__ import annotations

import os

# Before anything imports a hub client or a tokenizer.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

# How long an example takes is no property of it.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Tiny models gain nothing from more threads, which on a busy machine wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_outer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove ``CACHEBLEND_*`` from the environment, so that a test reads only the settings it makes; KV on disk is exact."""
    for name in list(os.environ):
        if name.upper().startswith("CACHEBLEND_") and name != "CACHEBLEND_DISK_CODEC":
            monkeypatch.delenv(name)
