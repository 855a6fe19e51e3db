"""Answers while the store is full, read-only, locked or gone: each is the undisturbed one, and the store is well afterwards."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import KVStore, check_store, open_store
from tests.engines import store_of
from tests.families import tiny_model, tiny_tokenizer, words
from tests.limits import wait_until
from tests.store.kit import fill, small_disk, writing_elsewhere

CHUNKS = [Chunk(words(12, n), f"n{n}", document=f"d{n % 2}", start=n) for n in range(8)]
PROMPTS = [BlendPrompt(words(3, 900), CHUNKS[n : n + 4], words(5, 901)) for n in range(4)]
MODEL = tiny_model("llama")


def open_engine(store: KVStore | Path | None, **changes: int) -> BlendEngine:
    given = {"recompute_ratio": 0.0, "self_check": False, "disk_codec": "native"} | changes
    return BlendEngine(MODEL, tiny_tokenizer(), **engine_settings(**given), store=store)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 3 MB."""
    with small_disk(tmp_path / "disk", 3 * 2**20) as folder:
        yield folder


@contextmanager
def full(folder: Path) -> Iterator[None]:
    other = fill(folder.parent)
    yield
    other.unlink()


FAULTS = {"full": full, "locked": writing_elsewhere}


@pytest.mark.parametrize("asked", [60, pytest.param(3000, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_question_is_answered_and_the_store_is_well_again(disk: Path, fault: str, asked: int) -> None:
    folder = disk / "store"
    store = open_store(folder, 10**7, 10**9, lock_timeout_s=1.0)
    with open_engine(store) as engine:
        engine.add(CHUNKS)
        wanted = [engine.prefill(prompt).logits for prompt in PROMPTS]
        with FAULTS[fault](folder):
            for number in range(asked):
                prompt = PROMPTS[number % 4]
                # Every third question is about a chunk that is not stored, and more than the disk can hold in the end.
                if number % 3 == 0:
                    fresh = Chunk(words(10, 1000 + number % 200), f"fresh-{number % 200}")
                    engine.prefill(BlendPrompt(words(3, 900), [*prompt.chunks, fresh], words(5, 901)))
                else:
                    result = engine.prefill(prompt)
                    assert result.report.hits > 0
                    assert (result.logits - wanted[number % 4]).abs().max() < 1e-3

        def is_well() -> bool:
            asked_anew = Chunk(words(10, time.monotonic_ns() % 2**31), f"new-{time.monotonic_ns()}")
            engine.prefill(BlendPrompt("t5", [asked_anew], "t6"))
            store_of(engine).settle()
            hits = [engine.prefill(prompt).report.hits for prompt in PROMPTS]
            return hits == [4] * 4

        wait_until(is_well, 90)
        for prompt, logits in zip(PROMPTS, wanted, strict=True):
            assert (engine.prefill(prompt).logits - logits).abs().max() < 1e-3
    store.close()
    assert check_store(folder).problems == []


def test_a_full_disk_is_opened_and_a_store_that_cannot_be_is_replaced_by_memory(disk: Path) -> None:
    with open_engine(disk / "store") as engine:
        engine.add(CHUNKS)
    fill(disk)
    with open_engine(disk / "store") as engine:
        assert engine.prefill(PROMPTS[0]).report.hits == 4
    # What the store has given up is taken as well.
    fill(disk)
    with open_engine(disk / "another") as engine:
        assert engine.store.path is None
        engine.add(CHUNKS)
        assert engine.prefill(PROMPTS[0]).report.hits == 4


def chunk(number: int) -> Chunk:
    return Chunk(words(60, number), str(number))


def test_a_disk_that_fills_up_keeps_what_was_used_last(disk: Path) -> None:
    folder = disk / "store"
    with open_engine(folder, disk_bytes=10**9, ram_bytes=0, encode_batch_tokens=64) as engine:
        engine.add([chunk(number) for number in range(4)])
        prompt = BlendPrompt(words(3, 10_000), ["0", "1", "2", "3"], words(5, 10_001))
        wanted = engine.prefill(prompt).logits
        assert engine.add([chunk(number) for number in range(4, 150)]).encoded == 146
        stats = engine.store.stats()
        assert stats.nodes == 150 and 10 < stats.entries == 2 * 150 - stats.evictions
        assert engine.store.holds(["149"]) == [True]
        # Nothing was lost but KV, which is there again.
        assert (engine.prefill(prompt).logits - wanted).abs().max() < 1e-3
        engine.flush()
        assert engine.prefill(prompt).report.hits == 4
        # Another program leaves no room at all: what is held makes room for what is new.
        fill(disk)
        assert engine.add([chunk(150)]).encoded == 1
        assert engine.contains("150")
        fill(disk)
        check_store(folder, repair=True)
        assert engine.delete(engine.ids()) == 151
        assert not list((folder / "kv").glob("*/*"))
    assert check_store(folder).problems == []


def test_by_default_half_of_the_disk_stays_free(disk: Path) -> None:
    free_bytes = shutil.disk_usage(disk).free
    with open_engine(disk / "store", ram_bytes=0, encode_batch_tokens=64) as engine:
        assert engine.add([chunk(number) for number in range(80)]).encoded == 80
        held = engine.store.stats()
        assert held.disk_bytes < free_bytes / 2 < 1.4 * held.disk_bytes
        assert (held.nodes, held.entries) == (80, 160 - held.evictions)
    # What is held stays, whoever fills the disk.
    fill(disk)
    with open_engine(disk / "store", ram_bytes=0) as engine:
        assert engine.store.stats().entries == held.entries
