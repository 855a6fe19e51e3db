"""What the benches share, and the benches of the store and of batches, each in its smallest size; see also test_gpu.py."""

import itertools
import json
import statistics
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from cacheblend_lab.bench.batch import BatchBench
from cacheblend_lab.bench.codecs import CodecBench
from cacheblend_lab.bench.find import FindBench
from cacheblend_lab.bench.index import IndexBench, make_index
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
    PMLSetting,
    PrefetchSetting,
    ServeSetting,
    TPOTSetting,
    TTFTSetting,
)
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
    assert (stats.entries, stats.nodes, stats.disk_bytes) == (520, 260, 520 * 64)
    store.close()
    with pytest.raises(ConfigError, match="is not empty"):
        IndexSetting((20,), folder=tmp_path)


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
    narrower = [rows[name] for name in ("native", "int8", "int4")]
    for wide, narrow in pairwise(narrower):
        assert wide.file_bytes > narrow.file_bytes
        assert wide.rms_error < narrow.rms_error <= narrow.max_error
    for row in rows.values():
        assert min(row.pack_bytes_per_s, row.unpack_bytes_per_s, row.copy_bytes_per_s) > 0
    # The file's head comes on top.
    assert rows["native"].file_bytes == pytest.approx(64 * TOKEN_BYTES, rel=0.05)
    assert rows["native"].share_of_float16 == rows["native"].file_bytes / (32 * TOKEN_BYTES)


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
        ("load --shape tiny --chunks 2 --chunk-tokens 16 --threads 1 --repeats 1", "threads", [None, 1]),
    ],
)
def test_a_command_writes_its_rows(tmp_path: Path, command: str, column: str, wanted: list[object]) -> None:
    file = tmp_path / "rows.json"
    on_disk = ("--folder", tmp_path) if command.startswith("load") else ()
    run(f"bench {command}", *on_disk, "--json", file)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row[column] for row in rows] == wanted
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (TPOTSetting, {"device": "toaster"}, "device 'toaster' cannot be used"),
        (TPOTSetting, {"device": "meta"}, "device 'meta' is not measured; choose cpu, cuda or cuda:N"),
        (TPOTSetting, {"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        (TPOTSetting, {"output_tokens": 1}, "output_tokens=1 must be at least 2"),
        (TPOTSetting, {"methods": ("full", "half")}, "method 'half' is not measured; choose among full, blend"),
        (TTFTSetting, {"tiers": ("ram", "tape")}, "'tape' is not measured here"),
        (TTFTSetting, {"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
        (AutoSetting, {"tiers": ()}, "at least one tier"),
        (AutoSetting, {"prompts": ((0, 5),)}, "at least 1 of each"),
        (PMLSetting, {"argument_tokens": 600}, "argument_tokens=600 must be fewer"),
        (IndexSetting, {"entries": (15,)}, "must each be at least 16"),
        (IndexSetting, {"lookups": 9}, "lookups=9 must be at least 100"),
        (FindSetting, {"chunks": 15}, "chunks=15 must be at least 16"),
        (CodecSetting, {"dtype": "int8"}, "dtype 'int8' is unknown; choose one of float32, float16, bfloat16"),
        (EncodeSetting, {"batch_tokens": 0}, "batch_tokens=0"),
        (BatchSetting, {"repeats": 0}, "repeats=0"),
        (LoadSetting, {"threads": (1, -1)}, "numbers of threads"),
        (PrefetchSetting, {"chunks": 5, "candidates": 4}, "chunks=5 cannot be chosen from candidates=4"),
        (PrefetchSetting, {"reranker_s": -1.0}, "reranker_s=-1.0 must be at least 0"),
        (ServeSetting, {"prompts": "names"}, "names"),
        (ServeSetting, {"corpus": 3}, "corpus"),
        (ServeSetting, {"rates": (0.0,)}, "rates"),
        (ServeSetting, {"seconds": 0}, "seconds"),
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
