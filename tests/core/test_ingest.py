"""Adding, at once and in the background: nothing is lost, nothing deleted comes back, prompts go first."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.codec import codec_names
from cacheblend_rag.engine import AddJob, supply
from cacheblend_rag.errors import ConfigError
from tests import poison
from tests.engines import busy
from tests.families import tiny_model, tiny_tokenizer, words

MODEL = tiny_model("llama")
CHUNKS = [Chunk(words(12 + seed, seed), f"n{seed}") for seed in range(6)]
IDS = [str(chunk.id) for chunk in CHUNKS]


def make(store: Path | None = None, **changes: object) -> BlendEngine:
    # One chunk a batch, so that there is much to come in between.
    settings = engine_settings(**({"strict": True, "self_check": False, "encode_batch_tokens": 1} | changes))  # type: ignore[arg-type]
    return BlendEngine(MODEL, tiny_tokenizer(), **settings, store=store)


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with make() as engine:
        yield engine


def held(engine: BlendEngine) -> dict[str, bool]:
    return dict(zip(engine.ids(), engine.store.holds(engine.ids()), strict=True))


@pytest.mark.parametrize(("companions", "encoded"), [("own", 0), ("neutral", 0), ("similar", 4)])
def test_what_comes_again_under_other_ids_keeps_its_kv(companions: str, encoded: int) -> None:
    old, new = (
        [Chunk(words(20, at), f"{name}{at}", document="d", start=at) for at in range(4)] for name in ("old", "new")
    )
    with make(companions=companions) as engine:
        engine.add(old)
        assert engine.add(new, gone=[str(each.id) for each in old]).encoded == encoded
        assert held(engine) == {f"new{at}": True for at in range(4)}
        # Another text's KV goes, and what was read behind it.
        engine.add([replace(old[3], text=words(20, 9))], gone=["new3"])
        assert held(engine).keys() == {"new0", "new1", "new2", "old3"}
        engine.add(new[:3])
        kv = {key for record in engine.records(engine.ids()) if record is not None for key in record.keys}
        assert all(held(engine).values()) and engine.store.stats().entries == len(kv)


def test_a_job_tells_how_far_it_is_and_what_it_did(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:1])
    seen: list[tuple[int, int]] = []
    with busy(engine):
        job = engine.add(CHUNKS, background=True, progress=lambda done, total: seen.append((done, total)))
        assert isinstance(job, AddJob)
        assert (job.done(), job.progress) == (False, (1, 6))
        with pytest.raises(TimeoutError):
            job.result(0.01)
        # Known at once, before there is any KV.
        assert held(engine) == {id: id == "n0" for id in IDS}
    result = job.result()
    assert (result.encoded, result.named, result.unchanged) == (5, 5, 1)
    assert (job.done(), job.progress) == (True, (6, 6))
    assert seen == [(done, 6) for done in range(1, 7)]
    assert held(engine) == dict.fromkeys(IDS, True)


@pytest.mark.parametrize("asked", ["error", "told", "background"])
def test_what_cannot_be_encoded_is_left_out_alone(asked: str) -> None:
    large = next(number for number in range(3, 97) if not any(f"t{number}" in chunk.text for chunk in CHUNKS))
    chunks = [*CHUNKS[:3], Chunk(f"t5 t{large} t5", "large"), *CHUNKS[3:]]
    refused: list[str | None] = []
    # All of them are one batch.
    with make(encode_batch_tokens=2048) as engine, poison.failing_on(engine.model, large):
        if asked == "told":
            chunks.append(Chunk(words(600, 1), "longer than the window"))
            engine.add(chunks, on_refused=lambda chunk, error: refused.append(chunk.id))
        elif asked == "error":
            with pytest.raises(torch.OutOfMemoryError):
                engine.add(chunks)
        else:
            job = engine.add(chunks, background=True)
            for outcome in (engine.flush, job.result):
                with pytest.raises(torch.OutOfMemoryError):
                    outcome()
            # Said once by a flush.
            engine.flush()
        assert sorted(refused) == (["large", "longer than the window"] if asked == "told" else [])
        # Names come first, and what has no KV is a miss.
        assert held(engine) == dict.fromkeys(IDS, True) | {"large": False}


def test_a_prompt_goes_before_what_waits_to_be_encoded(engine: BlendEngine) -> None:
    order: list[str] = []
    answer = threading.Thread(target=engine.prefill, args=(BlendPrompt("t5", [], "t6 t7"),))
    note = engine.model.get_decoder().register_forward_pre_hook(
        lambda *_: order.append("prompt" if threading.current_thread() is answer else "batch")
    )
    with note:
        with busy(engine) as until:
            engine.add(CHUNKS, background=True)
            answer.start()
            until(1)
        answer.join()
        engine.flush()
    assert order.index("prompt") <= 1
    assert order.count("batch") >= 6


def test_a_load_that_never_pauses_does_not_keep_chunks_waiting(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "_PATIENCE_S", 0.05)
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            with engine.backend.scheduler:
                time.sleep(0.002)

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        engine.add(CHUNKS, background=True)
        engine.flush()
    finally:
        stop.set()
    assert all(held(engine).values())


STEPS = st.tuples(st.sampled_from(["later", "now", "delete", "ask", "flush"]), st.integers(0, 2), st.integers(0, 2))


@settings(max_examples=25)
@given(st.lists(STEPS, max_size=12), st.booleans())
def test_after_any_interleaving_the_store_holds_what_a_dictionary_would(
    steps: list[tuple[str, int, int]], waits: bool
) -> None:
    """What is added may have to wait, until all else is done."""
    texts = [words(5 + n, 80 + n) for n in range(3)]
    wanted: dict[str, str] = {}
    with make() as engine:
        with busy(engine) if waits else nullcontext():
            for action, number, text in steps:
                id = f"n{number}"
                if action == "delete":
                    assert engine.delete([id]) == (wanted.pop(id, None) is not None)
                elif action == "flush" and not waits:
                    engine.flush()
                elif action == "ask" and id in wanted:
                    engine.prefill(BlendPrompt("t5", [id], "t6"))
                elif action in ("later", "now"):
                    engine.add([Chunk(texts[text], id)], background=waits or action == "later")
                    wanted[id] = texts[text]
        engine.flush()
        assert held(engine) == dict.fromkeys(wanted, True)
        said = {
            record.id: engine.tokenizer.decode(record.token_ids) for record in engine.records(list(wanted)) if record
        }
        assert said == wanted
        assert engine.store.stats().entries == 2 * len(set(wanted.values()))


@pytest.mark.parametrize("fails", [False, True])
def test_closing_waits_for_what_was_added_but_in_a_block_that_ends_by_an_error(tmp_path: Path, fails: bool) -> None:
    begun = threading.Event()

    def slow(*_: Any) -> None:
        begun.set()
        time.sleep(0.1)

    with suppress(KeyError), make(tmp_path / "kv") as engine:
        with engine.model.get_decoder().register_forward_pre_hook(slow):
            job = engine.add(CHUNKS, background=True)
            assert begun.wait(30)
            if fails:
                raise KeyError
            engine.close()
    with pytest.raises(ConfigError) if fails else nullcontext():
        assert job.result().encoded == 6
    with pytest.raises(ConfigError):
        engine.add(CHUNKS, background=True)
    with make(tmp_path / "kv") as again:
        # Nothing is lost: what has no KV is a miss.
        assert list(held(again)) == IDS
        assert all(held(again).values()) is not fails


@pytest.mark.parametrize("codec", codec_names())
def test_an_estimate_tells_the_size_of_what_is_added(codec: str, tmp_path: Path) -> None:
    with make(tmp_path / "kv", ram_codec=codec, disk_codec=codec, encode_batch_tokens=256) as engine:
        engine.add(CHUNKS[:1])
        before, expected = engine.store.stats(), engine.estimate(CHUNKS)
        assert engine.add(CHUNKS).encoded == expected.chunks == 5
        after = engine.store.stats()
        assert engine.estimate(CHUNKS).chunks == 0
    assert expected.disk_bytes == pytest.approx(after.disk_bytes - before.disk_bytes, rel=0.1)
    assert expected.ram_bytes == pytest.approx(after.ram_bytes - before.ram_bytes, rel=0.1)


_SCRIPT = """
from pathlib import Path
from cacheblend_rag import BlendPrompt
from tests.core.test_ingest import CHUNKS, make

make(Path({folder!r})).add(CHUNKS, background=True)
engine = make()
streams = [engine.stream(BlendPrompt("t5"), 400, min_new_tokens=400) for _ in range(3)]
streams[0].close()
"""


def test_streams_end_with_the_interpreter_and_what_was_given_is_encoded(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = _SCRIPT.format(folder=str(tmp_path / "kv"))
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with make(tmp_path / "kv") as engine:
        assert held(engine) == dict.fromkeys(IDS, True)


@pytest.mark.parametrize("name", ["", " ", "nan", "<NA>", float("nan"), None])
def test_what_names_no_document_is_none(name: Any) -> None:
    chunk = Chunk("Ticket 1.", "t1", document=name, start=0 if name else None)
    assert (chunk.document, chunk.start) == (None, None)


def test_chunks_added_a_second_time_under_other_ids_are_told(
    engine: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [Chunk(words(12, seed), f"a{seed}", document="manual", start=100 * seed) for seed in range(3)]
    engine.add(parts)
    engine.add(parts)
    assert not caplog.messages
    engine.add(
        [Chunk(part.text, f"b{number}", document="manual", start=part.start) for number, part in enumerate(parts)]
    )
    [said] = caplog.messages
    assert said.startswith("3 of 3 chunks ('b0' is one) are in their documents a second time")
