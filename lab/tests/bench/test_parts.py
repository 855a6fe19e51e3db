"""What the benches share, and the benches of the store and of batches, each in its smallest size."""

import itertools
import json
import random
import statistics
import sys
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from cacheblend_lab.bench.batch import BatchBench
from cacheblend_lab.bench.codecs import CodecBench
from cacheblend_lab.bench.encode import EncodeBench, EncodeRow
from cacheblend_lab.bench.find import FindBench
from cacheblend_lab.bench.index import IndexBench, make_index
from cacheblend_lab.bench.load import LoadBench
from cacheblend_lab.bench.prefetch import PrefetchBench
from cacheblend_lab.bench.runner import in_rounds, median_ratio, percentiles
from cacheblend_lab.bench.serve import ServeBench, arrivals
from cacheblend_lab.bench.settings import (
    AutoSetting,
    BatchSetting,
    CodecSetting,
    EncodeSetting,
    FindSetting,
    IndexSetting,
    LoadSetting,
    ModelSetting,
    PMLSetting,
    PrefetchSetting,
    ServeSetting,
    TPOTSetting,
)
from cacheblend_lab.bench.shapes import RandomWords, made_up_word, text_of, word_tokenizer
from cacheblend_lab.bench.tiers import cached_share, drop_cached
from cacheblend_rag.codec import codec_names
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store
from integrations.serve.tests.conftest import engine_of, serving
from tests.command import run
from tests.families import tiny_reader


def test_each_round_begins_with_another_method() -> None:
    order: list[str] = []
    calls: list[str] = []

    def run(method: str) -> int:
        order.append(method)
        return len(order)

    results = in_rounds("abc", run, 2, unmeasured=1, say=calls.append)
    assert "".join(order) == "abcbcacab"
    # The first round is not among them; the others are in the order in which they were run.
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert calls == [f"measuring, {done} of 9" for done in range(1, 10)]


def test_ratios_are_taken_round_by_round() -> None:
    # The medians are 2 and 3.
    assert median_ratio([1, 9, 2], [1, 3, 4]) == 1
    with pytest.raises(ValueError, match="longer"):
        median_ratio([1], [1, 2])


def test_percentiles() -> None:
    assert percentiles([float(number) for number in range(200, 0, -1)]) == (101, 199, 200)
    assert percentiles([3.0]) == (3, 3, 3)


def test_words_are_read_as_the_tokens_that_were_drawn() -> None:
    tokenizer = word_tokenizer(50)
    ids = RandomWords(tokenizer, 3).token_ids(500)
    assert set(ids) == set(range(1, 50))
    assert tokenizer(text_of(ids), add_special_tokens=False)["input_ids"] == ids
    assert RandomWords(tokenizer, 3).text(500) == text_of(ids) != RandomWords(tokenizer, 4).text(500)
    chunks = RandomWords(tokenizer, 3).chunks(4, 125)
    assert " ".join(chunk.text for chunk in chunks) == text_of(ids)
    assert len({chunk.id for chunk in chunks}) == 4
    assert sorted(RandomWords(tokenizer, 0).choice(6, 6)) == list(range(6))
    assert made_up_word(random.Random(1)) == made_up_word(random.Random(1)).lower() != ""


@pytest.mark.parametrize("kind", [TPOTSetting, PMLSetting, PrefetchSetting, EncodeSetting, AutoSetting])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
        ({"device": "meta"}, "device 'meta' is not measured; choose cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; choose one of float32, float16, bfloat16"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
    ],
)
def test_what_is_not_measured_is_refused(kind: type[ModelSetting], changes: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind("tiny", **changes)  # type: ignore[arg-type]


def test_the_environment_does_not_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENABLED": "false", "DTYPE": "float16"}.items():
        monkeypatch.setenv(f"CACHEBLEND_{name}", value)
    settings = ModelSetting("tiny").engine_settings(selector="random")
    config, blend = settings["config"], settings["blend"]
    assert (blend.enabled, config.dtype) == (True, "float32")
    assert blend.selector == "random"


# Four layers of two heads of sixteen, keys and values, in float32.
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4


def test_an_index(tmp_path: Path) -> None:
    seen: list[str] = []
    folder = tmp_path / "stores" / "500"
    (row,) = IndexBench(IndexSetting((500,), 100, tmp_path / "stores")).measure(seen.append)
    assert (row.entries, seen) == (500, ["measuring, 0 of 1"])
    assert 0 < row.lookup_p50_s <= row.lookup_p99_s <= row.lookup_max_s
    assert row.file_bytes == (folder / "index.sqlite").stat().st_size
    # The same rows again change nothing.
    make_index(folder, 520)
    store = open_store(folder, 0)
    stats = store.stats()
    assert (stats.entries, stats.nodes, stats.disk_bytes) == (520, 520, 520 * 64)
    store.close()
    with pytest.raises(ConfigError, match="is not empty"):
        IndexSetting((10,), folder=tmp_path)


@pytest.mark.parametrize("heading", [False, True])
def test_every_chunk_is_found_and_no_edited_one(heading: bool) -> None:
    bench = FindBench(FindSetting(chunks=200, prompts=100, prompt_chars=2000, heading=heading))
    assert len({*bench.texts}) == 200
    said: list[str] = []
    (row,) = bench.measure(said.append)
    assert row.found == row.placed == row.edited > 300
    assert row.false_hits == 0
    assert 0 < row.p50_s <= row.p99_s <= row.max_s
    assert min(row.open_s, row.after_add_s, row.after_other_s, row.after_delete_s) > 0
    assert row.mean_prompt_chars > 2000
    assert len(said) == 4


def test_the_bytes_and_errors_of_codecs_are_those_of_the_kv_that_they_packed() -> None:
    rows = {row.codec: row for row in CodecBench(CodecSetting("tiny", chunk_tokens=64, repeats=2)).measure()}
    assert tuple(rows) == codec_names()
    assert (rows["native"].rms_error, rows["native"].max_error) == (0, 0)
    narrower = [rows[name] for name in ("native", "float16", "int8", "int4", "int2")]
    for wide, narrow in pairwise(narrower):
        assert wide.file_bytes > narrow.file_bytes
        assert wide.rms_error < narrow.rms_error <= narrow.max_error
    for row in rows.values():
        assert min(row.pack_bytes_per_s, row.unpack_bytes_per_s, row.copy_bytes_per_s) > 0
    # The file's head comes on top.
    assert rows["native"].file_bytes == pytest.approx(64 * TOKEN_BYTES, rel=0.05)
    assert rows["native"].share_of_float16 == rows["native"].file_bytes / (32 * TOKEN_BYTES)


def test_every_method_of_encoding_does_the_same_work() -> None:
    bench = EncodeBench(EncodeSetting("tiny", chunks=5, chunk_tokens=12, prefix_tokens=3, batch_tokens=30, repeats=2))
    assert [list(batch.shape) for batch in bench._batches] == [[2, 15], [2, 15], [1, 15]]
    calls: list[str] = []
    rows = bench.measure(calls.append)
    assert [row.method for row in rows] == ["forward", "ram", "disk"]
    assert calls == [f"measuring, {done} of 6" for done in range(1, 7)]
    assert rows[0].share == 1.0
    for row in rows:
        assert (row.tokens, row.batches) == (60, 3)
        assert row.tokens_per_s == pytest.approx(60 / row.seconds)
        assert 0 < row.seconds_min <= row.seconds <= row.seconds_max
    assert [row.kv_bytes for row in rows] == [0, 60 * TOKEN_BYTES, 60 * TOKEN_BYTES]


def test_documents_are_read_in_the_same_windows_by_every_method() -> None:
    setting = EncodeSetting("tiny", 8, 12, 3, 60, document_chunks=4, overlap=4, context_tokens=24, repeats=1)
    bench = EncodeBench(setting)
    # Of each document of 36 tokens two windows: the 8 tokens that a chunk leaves are more than a quarter, and not read again.
    assert [batch.shape[1] - 3 for batch in bench._batches for _ in batch] == [20] * 4
    rows = bench.measure()
    assert [row.method for row in rows] == ["forward", "ram", "disk", "singly"]
    assert {row.kv_bytes for row in rows[1:]} == {8 * 12 * TOKEN_BYTES}


def test_the_loader_is_measured_beside_plain_reads(tmp_path: Path) -> None:
    calls: list[str] = []
    setting = LoadSetting("tiny", chunks=3, chunk_tokens=20, threads=(0, 2), repeats=2, folder=tmp_path)
    with LoadBench(setting) as bench:
        assert bench.file_bytes > 3 * 20 * TOKEN_BYTES
        rows = bench.measure(calls.append)
    assert [(row.method, row.threads) for row in rows] == [("plain reads", None), ("loader", 0), ("loader", 2)]
    assert rows[0].of_plain_reads == 1
    for row in rows:
        assert 0 < row.seconds_min <= row.seconds <= row.seconds_max
        assert row.bytes_per_s > 0 and row.of_plain_reads > 0
    assert calls[-1] == "measuring, 9 of 9"
    assert not list(tmp_path.iterdir())


def test_which_pages_are_in_memory_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(bytes(10 * 4096 + 7))
    drop_cached([file])
    after = cached_share([file])
    file.read_bytes()
    before = cached_share([file])
    # On a file system that lives in memory nothing can be dropped.
    assert (before, after) in [(1.0, 0.0), (1.0, 1.0), (None, None)]
    assert cached_share([]) is None


def test_each_method_of_prefetching_reads_from_where_it_should(tmp_path: Path) -> None:
    calls: list[str] = []
    # Time enough to read everything.
    sizes: dict[str, Any] = {"candidates": 4, "chunks": 2, "chunk_tokens": 20, "repeats": 1}
    with PrefetchBench(PrefetchSetting("tiny", **sizes, reranker_s=1.0, folder=tmp_path)) as bench:
        assert bench.file_bytes > 4 * 20 * TOKEN_BYTES
        rows = bench.measure(calls.append)
    assert [row.method for row in rows] == ["disk", "prefetch", "ram"]
    assert [row.tiers for row in rows] == [{"disk": 2}, {"ram": 2}, {"ram": 2}]
    assert rows[0].of_disk == 1
    for row in rows:
        assert 0 < row.ttft_min_s <= row.ttft_s <= row.ttft_max_s
        assert row.total_s >= row.ttft_s + 1.0
    assert calls[-1] == "measuring, 6 of 6"
    assert not list(tmp_path.iterdir())


def test_batches_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment says nothing here.
    monkeypatch.setenv("CACHEBLEND_ENABLED", "false")
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "random")
    calls: list[str] = []
    with BatchBench(BatchSetting(prompts=3, chunks=2, chunk_tokens=16, output_tokens=4, repeats=2)) as bench:
        rows = bench.measure(calls.append)
    assert calls[-1] == "measuring, 9 of 9"
    assert [(row.method, row.batch_size) for row in rows[:2]] == [("one by one", 1), ("batch", 3)]
    assert rows[2].method == "callers"
    for row in rows:
        assert 0 < row.elapsed_min_s <= row.elapsed_s <= row.elapsed_max_s
        assert row.tokens_per_s == pytest.approx(4 * row.prompts_per_s)
        assert row.prefill_s > 0 and row.decode_s > 0
        assert row.prefill_s + row.decode_s < 2 * row.elapsed_max_s
        assert row.hits == 6
        assert row.equal_answers == 3
    assert rows[0].speedup == 1


def test_without_langchain_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in the table of modules makes an import of that name fail.
    monkeypatch.delitem(sys.modules, "cacheblend_lab.bench.batch", raising=False)
    monkeypatch.setitem(sys.modules, "langchain_cacheblend", None)
    assert 'pip install "cacheblend-rag[langchain]"' in run("bench batch", code=2).output


@pytest.mark.parametrize(
    ("command", "column", "wanted"),
    [
        ("find --chunks 50 --prompts 100 --prompt-chars 500 --heading", "false_hits", [0]),
        ("codecs --shape tiny --chunk-tokens 40 --repeats 1 --dtype bfloat16", "codec", list(codec_names())),
        ("encode --shape tiny --chunks 2 --chunk-tokens 8 --repeats 1", "method", ["forward", "ram", "disk"]),
        ("load --shape tiny --chunks 2 --chunk-tokens 16 --threads 1 --repeats 1", "threads", [None, 1]),
        (
            "prefetch --shape tiny --candidates 3 --chunks 2 --chunk-tokens 16 --reranker-ms 50 --repeats 1",
            "method",
            ["disk", "prefetch", "ram"],
        ),
        (
            "batch --prompts 2 --chunks 1 --chunk-tokens 16 --output-tokens 2 --repeats 1",
            "method",
            ["one by one", "batch", "callers"],
        ),
    ],
)
def test_a_command_writes_its_rows(tmp_path: Path, command: str, column: str, wanted: list[object]) -> None:
    name = command.split()[0]
    file, folder = tmp_path / "rows.json", tmp_path / "folder"
    folder.mkdir()
    on_disk = ("--folder", folder) if name in ("encode", "load", "prefetch") else ()
    output = run(f"bench {command}", *on_disk, "--json", file).output
    whole = json.loads(file.read_text(encoding="utf-8"))
    assert [row[column] for row in whole["rows"]] == wanted
    assert all(row.keys() == whole["rows"][0].keys() for row in whole["rows"])
    assert not list(folder.iterdir())
    said = {"codecs": "copying runs at", "encode": "tokens/s", "load": "plain reads"}
    assert said.get(name, "") in output
    if name == "encode":
        assert whole["rows"][0].keys() >= {field.name for field in fields(EncodeRow)} | {"shape", "device", "dtype"}
    if name in ("load", "prefetch"):
        assert whole["setting"]["folder"] == str(folder)
        assert "cached_share_after_drop" in whole["setting"]
    if name == "prefetch":
        assert whole["setting"]["reranker_s"] == 0.05
    if name == "batch":
        assert whole["model"] == "reference"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (IndexSetting, {"entries": ()}, "must each be at least 8"),
        (IndexSetting, {"entries": (7,)}, "must each be at least 8"),
        (IndexSetting, {"lookups": 9}, "lookups=9 must be at least 100"),
        (FindSetting, {"chunks": 15}, "chunks=15 must be at least 16"),
        (FindSetting, {"prompts": 99}, "prompts=99 must be at least 100"),
        (CodecSetting, {"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
        (CodecSetting, {"dtype": "int8"}, "dtype 'int8' is unknown"),
        *(
            (kind, {name: 0}, f"{name}=0")
            for kind, names in (
                (EncodeSetting, ("chunks", "chunk_tokens", "prefix_tokens", "batch_tokens")),
                (BatchSetting, ("prompts", "chunks", "chunk_tokens", "question_tokens", "output_tokens", "repeats")),
                (LoadSetting, ("repeats",)),
            )
            for name in names
        ),
        (LoadSetting, {"threads": ()}, "numbers of threads"),
        (LoadSetting, {"threads": (1, -1)}, "numbers of threads"),
        (PrefetchSetting, {"chunks": 5, "candidates": 4}, "chunks=5 cannot be chosen from candidates=4"),
        (PrefetchSetting, {"reranker_s": -1.0}, "reranker_s=-1.0 must be at least 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(kind: Any, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**changes)


def test_what_commands_are_given_wrong_is_said() -> None:
    result = run("bench load --shape tiny --threads 1,many", code=2)
    assert "'many' in '1,many' is not a whole number; write numbers like 0,1,2,4" in result.output
    with pytest.raises(ConfigError, match="shape 'huge' is unknown"):
        CodecBench(CodecSetting("huge"))


SIZES: dict[str, Any] = {"corpus": 12, "chunks": 3, "chunk_words": 12, "output_tokens": 4}
SMALL: dict[str, Any] = {"rates": (20.0,), "seconds": 1.0, **SIZES}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_reader(eos_token_id=None)


def test_arrivals_follow_the_rate_and_zipfs_law() -> None:
    setting = ServeSetting(rates=(5.0,), seconds=400, corpus=50, chunks=2, zipf=1.0)
    found = arrivals(setting, 5.0)
    assert found == arrivals(setting, 5.0)
    assert len(found) == pytest.approx(2000, rel=0.1)
    gaps = [later.at_s - one.at_s for one, later in itertools.pairwise(found)]
    # Of a Poisson process the gaps' deviation is their mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.15)
    assert all(len(set(each.chunks)) == 2 for each in found)
    counts = [count for _, count in Counter(each.chunks[0] for each in found).most_common()]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.4)
    even = Counter(each.chunks[0] for each in arrivals(ServeSetting(corpus=4, chunks=1, zipf=0.0, seconds=400), 5.0))
    assert max(even.values()) < 1.3 * min(even.values())


@pytest.mark.parametrize("prompts", ["documents", "text"])
def test_rows_are_complete(prompts: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    with engine_of(model, separator="\n\n") as engine, serving(engine) as address:
        options = ["--url", address, "--prompts", prompts, "--rates", "20", "--seconds", "1", "--corpus", "12"]
        options += ["--chunks", "3", "--chunk-words", "12", "--output-tokens", "4", "--json", str(file)]
        run("bench serve", *options)
        assert len(engine.ids()) == (12 if prompts == "documents" else 0)
    whole = json.loads(file.read_text())
    first, row = whole["rows"]
    assert (first["rate"], row["rate"]) == (None, 20.0)
    assert row["requests"] == len(arrivals(ServeSetting(**SMALL), 20.0))
    for each in (first, row):
        assert each["failed"] == 0
        assert 0 < each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"]
        assert 0 < each["tpot_p50_s"] <= each["tpot_p90_s"]
        assert each["output_rate"] > 0
        assert 0 <= each["goodput"] <= 1
        # Three chunks of 12 words, and the question.
        assert each["prompt_tokens"] > 50
    assert first["goodput"] == 1


def test_what_fails_is_counted(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # As few as possible, since what may be asked grows while they are.
    monkeypatch.setattr("cacheblend_lab.bench.serve._WARM_UP", 0)
    with engine_of(model, separator="\n\n") as engine, serving(engine, per_minute=14) as address:
        with ServeBench(ServeSetting(url=address, prompts="text", **SMALL)) as bench:
            _, row = bench.measure()
    # The names of the models were asked for, and the unloaded prompts.
    assert row.failed == row.requests - 1
    assert row.goodput <= 1 / row.requests


def test_what_cannot_be_asked_is_said(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="does not say which model it has"):
        ServeBench(ServeSetting(url="http://127.0.0.1:9"))
    with engine_of(model) as engine, serving(engine, body_bytes=300) as address:
        with pytest.raises(ConfigError, match="did not store the corpus"):
            ServeBench(ServeSetting(url=address, **SMALL))
    for wrong in ({"prompts": "names"}, {"corpus": 3}, {"rates": (0.0,)}, {"seconds": 0}):
        with pytest.raises(ConfigError):
            ServeSetting(**wrong)
