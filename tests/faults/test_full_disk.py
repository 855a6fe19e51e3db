"""A disk that fills up: a real one, a small file system in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.lab.settings import engine_settings
from cacheblend_rag.store import check_store
from tests.families import tiny_model, tiny_tokenizer, words


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(disk: Path) -> None:
    settings = engine_settings(recompute_ratio=0.3, ram_bytes=0, encode_batch_tokens=64)
    chunks = [Chunk(id=str(number), text=words(60, number)) for number in range(2_000)]
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=disk / "store") as engine:
        engine.add(chunks[:4])
        prompt = BlendPrompt(words(3, 10_000), ["0", "1", "2", "3"], words(5, 10_001))
        undisturbed = engine.prefill(prompt)
        with pytest.raises(StoreFullError, match="no space left"):
            engine.add(chunks)
        stored = engine.ids()
        assert 4 < len(stored) < len(chunks)
        again = engine.prefill(prompt)
        assert again.report.hits == 4
        torch.testing.assert_close(again.logits, undisturbed.logits, atol=0, rtol=0)
        # Chunks that cannot be stored are answered from all the same.
        mixed = engine.prefill(BlendPrompt(words(3, 10_000), ["0", chunks[-1]], words(5, 10_001)))
        assert (mixed.report.hits, mixed.report.misses) == (1, 1)
        # A full disk does not keep anything from being deleted, and then there is room again.
        assert engine.delete(stored[4:]) == len(stored) - 4
        assert engine.add(chunks[4:12]).encoded == 8
    assert check_store(disk / "store").problems == []
