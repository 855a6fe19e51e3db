"""Adding in the background and on second use: nothing is lost, nothing deleted comes back, prompts go first."""

import base64
import gc
import logging
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.codec import codec_names
from cacheblend_rag.engine import AddJob
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.errors import BackendError, ConfigError, EmptyChunkError, StoreFullError
from cacheblend_rag.keys import chunk_key
from cacheblend_rag.kv import ChunkKV
from tests import poison
from tests.families import tiny_model, tiny_tokenizer, words

MODEL = tiny_model("llama")
CHUNKS = [Chunk(words(12 + seed, seed), f"n{seed}") for seed in range(6)]


def make(store: Path | None = None, **changes: object) -> BlendEngine:
    # One chunk a batch, so that there is much to come in between.
    settings = engine_settings(**({"strict": True, "self_check": False, "encode_batch_tokens": 1} | changes))  # type: ignore[arg-type]
    return BlendEngine(MODEL, tiny_tokenizer(), **settings, store=store)


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with make() as engine:
        yield engine


def held(engine: BlendEngine) -> dict[str, bool]:
    records = engine.records(engine.ids())
    return {record.id: engine._store.holds([record.key])[0] for record in records if record is not None}


def test_a_job_tells_how_far_it_is_and_what_it_did(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:1])
    seen: list[tuple[int, int]] = []
    with engine._runner.scheduler:
        job = engine.add(CHUNKS, background=True, progress=lambda done, total: seen.append((done, total)))
        assert isinstance(job, AddJob)
        assert (job.done(), job.progress) == (False, (1, 6))
        with pytest.raises(TimeoutError, match="1 of 6"):
            job.result(0.01)
        # Known at once, before there is any KV.
        assert held(engine) == {f"n{n}": n == 0 for n in range(6)}
    result = job.result()
    assert (result.encoded, result.named, result.unchanged) == (5, 5, 1)
    assert (job.done(), job.progress) == (True, (6, 6))
    assert seen == [(done, 6) for done in range(1, 7)]
    assert all(held(engine).values())
    engine.flush()


@pytest.mark.parametrize("background", [False, True])
def test_bad_chunks_are_refused_at_once_and_the_others_stored(engine: BlendEngine, background: bool) -> None:
    with pytest.raises(EmptyChunkError):
        engine.add([*CHUNKS, Chunk(" ", "blank")], background=background)
    engine.flush()
    assert held(engine) == {f"n{n}": True for n in range(6)}


@pytest.mark.parametrize("asked", ["error", "told", "background"])
def test_what_cannot_be_encoded_is_left_out_alone(asked: str) -> None:
    large = next(number for number in range(3, 97) if not any(f"t{number}" in chunk.text for chunk in CHUNKS))
    chunks = [*CHUNKS[:3], Chunk(f"t5 t{large} t5", "large"), *CHUNKS[3:]]
    refused: list[tuple[Any, str]] = []
    # All of them are one batch.
    with make(encode_batch_tokens=2048) as engine, poison.failing_on(engine.model, large):
        if asked == "told":
            engine.add(chunks, on_refused=lambda chunk, error: refused.append((chunk.id, str(error))))
        else:
            job = engine.add(chunks, background=True) if asked == "background" else None
            with pytest.raises(torch.OutOfMemoryError, match="no room for this one"):
                job.result() if job else engine.add(chunks)
        assert refused == ([("large", refused[0][1])] if asked == "told" else [])
        stored = {f"n{n}": True for n in range(6)}
        # In the background the names come first, and what has no KV is a miss.
        assert held(engine) == (stored | {"large": False} if asked == "background" else stored)


def test_a_prompt_goes_before_what_waits_to_be_encoded(engine: BlendEngine) -> None:
    encode = engine._supply._encoder.encode  # type: ignore[union-attr]
    started, go_on, order = threading.Event(), threading.Event(), []

    def slow(targets: object) -> object:
        started.set()
        go_on.wait(30)
        order.append("batch")
        return encode(targets)  # type: ignore[arg-type]

    def note(*_: object) -> None:
        # While it has the model, for what comes after an answer may come before its thread goes on.
        if threading.current_thread() is answer:
            order.append("prompt")

    answer = threading.Thread(target=engine.prefill, args=(BlendPrompt("t5", [], "t6 t7"),))
    hook = engine.model.register_forward_pre_hook(note)
    engine._supply._encoder.encode = slow  # type: ignore[method-assign, union-attr, assignment]
    with engine._runner.scheduler:
        engine.add(CHUNKS, background=True)
        answer.start()
        while not engine._runner.scheduler.wanted:
            pass
    assert started.wait(30)
    go_on.set()
    answer.join()
    engine.flush()
    hook.remove()
    assert order.index("prompt") <= 1
    assert order.count("batch") >= 6


def test_a_chunk_that_is_asked_for_before_its_turn_is_a_miss_and_is_encoded_once(engine: BlendEngine) -> None:
    with engine._runner.scheduler:
        job = engine.add(CHUNKS, background=True)
        assert engine.prefill(BlendPrompt("t5", ["n5"], "t6")).report.misses == 1
    assert job.result().encoded == 5
    assert engine.prefill(BlendPrompt("t5", ["n5"], "t6")).report.hits == 1


def test_of_two_adds_of_one_id_the_last_counts(engine: BlendEngine) -> None:
    with engine._runner.scheduler:
        old = engine.add(CHUNKS[:2], background=True)
        new = engine.add([Chunk(words(9, 70), "n0")], background=True)
        before = threading.Thread(target=engine.add, args=([Chunk(words(7, 71), "n1")],))
        before.start()
    # Its batch may have been looked at before the second add, and is then encoded in vain.
    old.result()
    assert new.result().encoded == 1
    before.join()
    texts = {record.id: len(record.token_ids) for record in engine.records(["n0", "n1"]) if record is not None}
    assert texts == {"n0": 9, "n1": 7}
    assert all(held(engine).values())
    assert engine._store.stats().entries == 4


def test_a_text_of_another_name_outlives_a_deletion(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    put = engine._store.put

    def share_then_put(key: str, kv: ChunkKV, **options: Any) -> None:
        monkeypatch.setattr(engine._store, "put", put)
        engine.add([Chunk(CHUNKS[0].text, "twin")])
        engine.delete(["n0"])
        put(key, kv, **options)

    monkeypatch.setattr(engine._store, "put", share_then_put)
    engine.add(CHUNKS[:1], background=True).result()
    assert held(engine) == {"twin": True}


Step = tuple[str, int, int]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["later", "now", "delete", "ask", "flush"]), st.integers(0, 2), st.integers(0, 2)),
        max_size=12,
    )
)
def test_after_any_interleaving_the_store_holds_what_a_dictionary_would(steps: list[Step]) -> None:
    texts = [words(5 + n, 80 + n) for n in range(3)]
    wanted: dict[str, str] = {}
    with make() as engine:
        for action, number, text in steps:
            id = f"n{number}"
            if action == "delete":
                engine.delete([id])
                wanted.pop(id, None)
            elif action == "flush":
                engine.flush()
            elif action == "ask":
                if id in wanted:
                    engine.prefill(BlendPrompt("t5", [id], "t6"))
            else:
                engine.add([Chunk(texts[text], id)], background=action == "later")
                wanted[id] = texts[text]
        engine.flush()
        assert held(engine) == dict.fromkeys(wanted, True)
        keys = {record.id: record.key for record in engine.records(list(wanted)) if record is not None}
        assert keys == {
            id: chunk_key(engine.namespace, engine._assembler.tokenize(text)) for id, text in wanted.items()
        }
        assert engine._store.stats().entries == 2 * len(set(wanted.values()))


def test_errors_come_out_of_the_job_and_of_one_flush(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    put = engine._store.put
    failing = engine._assembler.record(CHUNKS[2]).key

    def fail(key: str, kv: ChunkKV, **options: Any) -> None:
        if key == failing:
            raise StoreFullError("no room")
        put(key, kv, **options)

    monkeypatch.setattr(engine._store, "put", fail)
    job = engine.add(CHUNKS[:4], background=True)
    after = engine.add(CHUNKS[4:], background=True)
    with pytest.raises(StoreFullError, match="no room"):
        engine.flush()
    with pytest.raises(StoreFullError, match="no room"):
        job.result()
    assert after.result().encoded == 2
    engine.flush()
    # What was encoded before the error was stored.
    assert held(engine) == {"n0": True, "n1": True, "n2": False, "n3": False, "n4": True, "n5": True}
    with pytest.raises(StoreFullError, match="no room"):
        engine.add(CHUNKS[:4])
    monkeypatch.setattr(engine._store, "put", put)
    engine.add(CHUNKS)
    assert all(held(engine).values())


def test_closing_waits_for_what_was_added(tmp_path: Path) -> None:
    with make(tmp_path / "kv") as engine:
        engine.add(CHUNKS, background=True)
    with make(tmp_path / "kv") as again:
        assert held(again) == {f"n{n}": True for n in range(6)}
    with pytest.raises(ConfigError, match="closed"):
        engine.add(CHUNKS, background=True)
    with pytest.raises(ConfigError, match="closed"):
        engine.flush()


def test_a_block_that_ends_by_an_error_does_not_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jobs: list[AddJob] = []

    def fail_inside() -> None:
        with make(tmp_path / "kv") as engine:
            encode, waiting = engine._supply.encode, threading.Event()

            def once(*args: object, **kwargs: object) -> object:
                waiting.set()
                while not engine._ingest.jobs._giving_up:
                    pass
                return encode(*args, **kwargs)  # type: ignore[arg-type]

            engine._supply.encode = once  # type: ignore[method-assign, assignment]
            jobs.append(engine.add(CHUNKS, background=True))
            assert waiting.wait(30)
            raise KeyError("out")

    with caplog.at_level(logging.WARNING, logger="cacheblend_rag"), pytest.raises(KeyError):
        fail_inside()
    [job] = jobs
    with pytest.raises(ConfigError, match=" of 6 chunks were encoded"):
        job.result()
    assert any(" of 6" in record.message for record in caplog.records)
    # Nothing is lost: the names are there, and what has no KV is a miss.
    with make(tmp_path / "kv") as again:
        assert again.prefill(BlendPrompt("t5", [f"n{n}" for n in range(6)], "t6")).report.misses >= 1
        assert again.prefill(BlendPrompt("t5", [f"n{n}" for n in range(6)], "t6")).report.misses == 0


def test_no_thread_is_left_behind(engine: BlendEngine) -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("cacheblend-")]

    engine.add(CHUNKS)
    engine.add([Chunk(words(9, 70), "m")], background=True)
    engine.close()
    gc.collect()
    assert ours() == []


@pytest.mark.parametrize("background", [False, True])
def test_an_ingestion_says_its_cost(tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cacheblend_rag.engine.ingest")
    with make(tmp_path / "kv") as engine:
        engine.generate(BlendPrompt("t5", [Chunk(words(9, 70))], "t6"), 1)
        assert not any("encoded in" in message for message in caplog.messages)
        caplog.clear()
        for chunks in (CHUNKS[:4], CHUNKS):
            engine.add(chunks, background=background)
            engine.flush()
        [said] = caplog.messages
    assert re.match(rf"4 chunks of 54 tokens encoded in .* s; the store in {tmp_path}/kv now has 0.\d MB of KV", said)


def test_turns_are_taken_in_the_order_of_coming() -> None:
    turn, order = Scheduler(), []

    def take(number: int) -> None:
        with turn, turn:
            order.append(number)

    def take_after_others() -> None:
        with turn.after_others(), turn:
            order.append(-1)

    with turn:
        threads = [threading.Thread(target=take_after_others)]
        threads[0].start()
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            while len(turn.line()) <= number:
                pass
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, -1]


def test_no_error_lost(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    encode = engine._supply.encode

    def fail(*args: Any, **options: Any) -> Any:
        raise StoreFullError("late")

    def encode_one(targets: Any, **options: Any) -> Any:
        yield from encode(targets[:1], **options)
        raise BackendError

    monkeypatch.setattr(engine._store, "put", fail)
    for count in (1, 2):
        with pytest.raises(StoreFullError, match="late"):
            engine.add(CHUNKS[:count])
    monkeypatch.setattr(engine._supply, "encode", encode_one)
    with caplog.at_level(logging.WARNING, logger="cacheblend_rag"), pytest.raises(BackendError):
        engine.add(CHUNKS[:1])
    assert any("late" in record.message for record in caplog.records)


@pytest.mark.parametrize("codec", codec_names())
def test_an_estimate_tells_the_size_of_what_is_added(codec: str, tmp_path: Path) -> None:
    with make(tmp_path / "kv", ram_codec=codec, disk_codec=codec, encode_batch_tokens=256) as engine:
        expected = engine.estimate(CHUNKS)
        engine.add(CHUNKS)
        held = engine.store.stats()
    assert expected.disk_bytes == pytest.approx(held.disk_bytes, rel=0.1)
    assert expected.ram_bytes == pytest.approx(held.ram_bytes, rel=0.1)


_SCRIPT = """
from pathlib import Path
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from tests.core.test_ingest import CHUNKS, make
from tests.families import tiny_model, tiny_tokenizer, words

make(Path({folder!r})).add(CHUNKS, background=True)
engine = BlendEngine(tiny_model("llama", "sdpa"), tiny_tokenizer(), blend=BlendConfig(selector="none"))
engine.add([Chunk(words(20, 0), "n0")])
prompt = BlendPrompt(words(4, 1), ["n0"], words(5, 2))
streams = [engine.stream(prompt, 400, min_new_tokens=400) for _ in range(5)]
for stream in streams[:2]:
    stream.close()
    list(stream)
print("end")
"""


def test_streams_end_with_the_interpreter_and_what_was_given_is_encoded(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = _SCRIPT.format(folder=str(tmp_path / "kv"))
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    with make(tmp_path / "kv") as engine:
        assert held(engine) == {f"n{n}": True for n in range(6)}


@pytest.mark.parametrize("name", ["", " ", "nan", "<NA>", float("nan"), None])
def test_what_names_no_document_is_none(name: Any) -> None:
    chunk = Chunk("Ticket 1.", "t1", document=name, start=0 if name else None, source=name)
    assert (chunk.document, chunk.start, chunk.source) == (None, None, None)


@pytest.mark.parametrize("background", [False, True])
def test_many_short_texts_of_one_name_are_encoded_alone(engine: BlendEngine, background: bool) -> None:
    def add(name: str, size: int = 2, **places: range) -> list[str | None]:
        about = [{key: values[n] for key, values in places.items()} for n in range(50)]
        chunks = [Chunk(words(size, n), f"{name}{n}", document=name, source=name, **about[n]) for n in range(50)]
        for some in (chunks[:40], *([chunk] for chunk in chunks[40:])):
            engine.add(some, background=background)
        engine.flush()
        return engine.places([str(chunk.id) for chunk in chunks])

    assert add("news") == [None] * 50
    assert not engine.indexed(["news"])
    # What says where it stands, or is longer, is a document.
    assert None not in add("starts", start=range(50))
    assert None not in add("long", 81)


@pytest.mark.parametrize("place", [{}, {"document": "d", "start": 0}])
@pytest.mark.parametrize("later", ["two.txt", None])
def test_a_text_is_made_of_what_its_vector_store_said_last(
    engine: BlendEngine, later: str | None, place: dict[str, Any]
) -> None:
    text = words(5, 1)
    for source in ("one.txt", later):
        engine.add([Chunk(text, "n", source=source, indexed=True, **place)])
    # What a prompt does not say is left as it is.
    engine.prefill(BlendPrompt("t5", [Chunk(text, "n", **place)], "t6"))
    assert (engine.indexed(["one.txt"]), engine.indexed(["two.txt"]), engine.indexed()) == (
        [],
        ["n"] if later else [],
        ["n"],
    )
    # Nothing is left of the source, so what prompts brought of it goes.
    engine.prefill(BlendPrompt("t5", [Chunk(words(5, 7), "parent", source="one.txt")], "t6"))
    engine.flush()
    engine.delete([], sources=["one.txt"])
    assert engine.ids() == ["n"]


@pytest.mark.parametrize("kind", ["base64", "text"])
def test_what_has_very_many_tokens_is_warned_of(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    blob = base64.b64encode(random.Random(0).randbytes(3000)).decode()
    text = blob if kind == "base64" else "The harbour office opens at eight. " * (len(blob) // 35)
    with BlendEngine.from_pretrained("reference") as engine:
        engine.estimate([Chunk(text[at : at + 100], f"c{at}") for at in range(0, len(text), 100)])
    told = [record.message for record in caplog.records if "MB of KV before the disk's codec" in record.message]
    assert len(told) == (kind == "base64")


def test_a_long_addition_logs_how_far_it_is(
    engine: BlendEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("cacheblend_rag.engine.background._LOGGED_S", 0.0)
    engine.add(CHUNKS)
    assert "6 of 6 chunks encoded after 0 s" in caplog.text
