"""The benches, each in its smallest size, and what they share; see also test_gpu.py."""

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend_lab.bench.capacity import main as capacity
from cacheblend_lab.bench.picture import main as draw
from cacheblend_lab.bench.real import main as real
from cacheblend_lab.bench.runner import cell, in_rounds, median_ratio, percentile, shown, spread
from cacheblend_lab.bench.serve import prompts_of
from cacheblend_lab.bench.shapes import SHAPES, shape_config
from cacheblend_lab.soak import main as soak
from integrations.serve.tests.conftest import engine_of, serving
from tests.cli.conftest import model_folder as model_folder
from tests.command import read_rows, run
from tests.families import tiny_reader

# Four layers of two heads of sixteen, keys and values, in float32.
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4


def test_each_round_begins_with_another_method() -> None:
    order: list[str] = []

    def run(method: str) -> int:
        order.append(method)
        return len(order)

    results = in_rounds("abc", run, 2, unmeasured=1, say=str)
    assert "".join(order) == "abcbcacab"
    # The first round is not among them; the others are in the order in which they were run.
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_figures_and_tables() -> None:
    # Round by round; the medians are 2 and 3.
    assert median_ratio([1, 9, 2], [1, 3, 4]) == 1
    assert spread("ttft", [3.0, 1.0, 8.0]) == {"ttft_s": 3, "ttft_min_s": 1, "ttft_max_s": 8}
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 50, 100)] == [1, 2, 3]
    assert [percentile([float(number) for number in range(200)], share) for share in (50, 99)] == [100, 198]
    assert shown([{"a_s": 1, "a_min_s": 1, "b": None}, {"a_s": 2, "b": None, "c": 0}]) == ["a_s", "c"]
    values = {"a_s": 0.002, "a_per_s": 1234.5, "a_bytes": 1500, "share": 0.12345, "count": 1200, "name": "x"}
    assert [cell(*each) for each in values.items()] == ["2 ms", "1,234", "1.5 kB", "0.123", "1,200", "x"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model(name: str) -> None:
    # On no device: the layers are made, their numbers are not.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    millions = {"smollm2-360m": 362, "qwen2-0.5b": 494, "qwen2.5-7b": 7616, "llama-3.2-1b": 1236, "llama-3.1-8b": 8030}
    counted = round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
    assert counted == millions.get(name, counted)


def test_first_tokens_are_measured_from_each_tier(tmp_path: Path) -> None:
    file = tmp_path / "ttft.json"
    sizes = "--chunks 3 --chunk-tokens 20 --question-tokens 5 --head-tokens 3 --separator-tokens 2 --ratios 0,0.15"
    run(f"bench ttft --shape tiny --tiers ram,disk --repeats 2 {sizes} --folder {tmp_path} --json {file}")
    rows = read_rows(file)
    stored = [(name, tier) for tier in ("ram", "disk") for name in ("reuse", "gapless")]
    blends = [("blend", tier) for tier in ("ram", "disk")]
    assert [(row["method"], row["tier"]) for row in rows] == [("full", None), ("prefix_cache", None), *stored, *blends]
    assert rows[0]["speedup"] == 1
    for row in rows:
        assert 0 < row["ttft_min_s"] <= row["ttft_s"] <= row["ttft_max_s"]
        assert (row["over_ram"] == 1) == (row["tier"] == "ram")
        assert (row["of_reuse"] is None) == (row["method"] not in ("reuse", "gapless"))
    reads = {(row["method"], row["tier"]): row["load_bytes"] for row in rows}
    # Of the four layers a blend computes the first in full.
    assert reads["reuse", "disk"] == reads["reuse", "ram"] == 60 * TOKEN_BYTES
    assert reads["blend", "disk"] == reads["blend", "ram"] == 45 * TOKEN_BYTES
    assert reads["gapless", "disk"] > reads["reuse", "disk"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("document_chunks", [0, 3])
def test_both_kv_of_added_chunks_are_stored(document_chunks: int, tmp_path: Path) -> None:
    file = tmp_path / "encode.json"
    sizes = f"--chunks 7 --chunk-tokens 20 --document-chunks {document_chunks} --repeats 2 --folder {tmp_path}"
    run(f"bench encode --shape tiny {sizes} --json {file}")
    rows = {row["method"]: row for row in read_rows(file)}
    assert list(rows) == ["forward", "once", "ram", "disk", "singly"]
    for row in rows.values():
        assert row["tokens"] == 140 and 0 < row["encode_min_s"] <= row["encode_s"] <= row["encode_max_s"]
        assert row["tokens_per_s"] == pytest.approx(140 / row["encode_s"])
    assert rows["forward"]["of_forward"] == rows["once"]["of_once"] == 1
    assert [row["kv_bytes"] / (140 * TOKEN_BYTES) for row in rows.values()] == [0, 1, 2, 2, 2]
    assert list(tmp_path.iterdir()) == [file]


def test_each_method_of_prefetching_reads_from_where_it_should(tmp_path: Path) -> None:
    file = tmp_path / "prefetch.json"
    # Time enough to read everything.
    sizes = f"--candidates 4 --chunks 2 --chunk-tokens 20 --repeats 1 --reranker-ms 1000 --folder {tmp_path}"
    run(f"bench prefetch --shape tiny {sizes} --json {file}")
    rows = read_rows(file)
    assert [(row["method"], row["read_from"]) for row in rows] == [
        ("disk", "2 disk"),
        ("prefetch", "2 ram"),
        ("ram", "2 ram"),
    ]
    assert rows[0]["of_disk"] == 1 and all(0 < row["ttft_s"] < 1 for row in rows)
    assert list(tmp_path.iterdir()) == [file]


def test_an_index(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    run(f"bench index --entries 500 --json {file}")
    (row,) = read_rows(file)
    assert row["entries"] == 500 and 0 < row["p50_s"] <= row["p99_s"] and row["index_bytes"] > 500 * 64


def test_prompts_follow_zipfs_law() -> None:
    def firsts(corpus: int, count: int, exponent: float) -> list[int]:
        found = list(itertools.islice(prompts_of(random.Random(0), corpus, count, exponent), 2000))
        assert all(len(set(each)) == count for each in found)
        return [many for _, many in Counter(each[0] for each in found).most_common()]

    counts, even = firsts(50, 2, 1.0), firsts(4, 1, 0.0)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.4)
    assert even[0] < 1.3 * even[-1]


@pytest.mark.parametrize(("prompts", "per_minute"), [("documents", None), ("text", None), ("text", 50)])
def test_a_server_is_asked_at_each_rate(prompts: str, per_minute: int | None, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    sizes = "--rates 20 --seconds 1 --corpus 12 --chunks 3 --chunk-words 12 --output-tokens 4"
    limits = {} if per_minute is None else {"per_minute": per_minute}
    with engine_of(tiny_reader(eos_token_id=None), separator="\n\n") as engine, serving(engine, **limits) as address:
        run(f"bench serve --url {address} --prompts {prompts} {sizes} --json {file}")
        assert len(engine.ids()) == (12 if prompts == "documents" else 0)
    first, row = read_rows(file)
    assert (first["rate"], row["rate"], row["requests"]) == ("one by one", "20", 20)
    if per_minute is not None:
        assert 0 < row["failed"] < 20 and row["goodput"] <= 1 - row["failed"] / 20
        return
    for each in (first, row):
        assert each["failed"] == 0
        assert 0 < each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"]
        assert 0 < each["tpot_p50_s"] <= each["tpot_p90_s"]
        assert each["tokens_per_s"] > 0 and 0 <= each["goodput"] <= 1
        # Three chunks of 12 words, and the question.
        assert each["prompt_tokens"] > 50


def test_a_model_is_timed_alone_from_stored_kv_and_by_several_callers(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "real.json"
    options: dict[str, Any] = {"tokens": "500", "answer_tokens": 3, "callers": 2, "rounds": 2}
    real(str(model_folder), **options, ratios="0.15", disk=True, device="cpu", dtype="float32", json_file=file)
    first, answer, *reordered, together, again = read_rows(file)
    assert first["tokens"] == answer["tokens"] == together["tokens"] == again["tokens"] > 500
    assert all(
        row[name] > 0 for row in (first, answer, *reordered, again) for name in ("alone_s", "stored_s", "speedup")
    )
    others = ("disk_s", "disk_speedup", "recomputed_0.15_s", "recomputed_0.15_speedup")
    assert all(row[name] > 0 for row in (first, answer) for name in others)
    assert min(together[name] for name in ("stored_s", "tokens_per_s", "over_one_by_one", "first_p95_s")) > 0
    draw(file, picture := tmp_path / "speed.svg")
    drawn = picture.read_text()
    assert "first token, stored KV" in drawn and "answer of 3 tokens, full prefill" in drawn
    draw(file, picture)
    assert picture.read_text() == drawn


def test_what_kv_takes(model_folder: Path, tmp_path: Path) -> None:
    capacity(str(model_folder), tokens=500, kv_mb=4, chunks=2, rounds=1, json_file=tmp_path / "capacity.json")
    rows = read_rows(tmp_path / "capacity.json")
    assert [row["what"] for row in rows] == 4 * ["first token"] + 3 * ["ingestion"] + 4 * ["memory"]


def test_callers_ask_while_documents_change(model_folder: Path, tmp_path: Path) -> None:
    setting = {"minutes": 0.05, "callers": 2, "documents": 5, "ram_mb": 1, "disk_mb": 4, "pause_s": 0.1, "judged": 1}
    soak(str(model_folder), **setting, json_file=tmp_path / "soak.json")  # type: ignore[arg-type]
    (row,) = read_rows(tmp_path / "soak.json")
    assert row["answers"] > 0 and row["updates"] > 0 and row["stale"] == row["left_kv"] == 0


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("ttft --shape tiny --device toaster", "'toaster'"),
        ("ttft --shape tiny --dtype int8", "'int8'"),
        ("ttft --shape tiny --tiers ram,tape", "'tape'"),
        ("ttft --shape tiny --ratios 0,some", "'0,some'"),
        ("prefetch --shape tiny --chunks 13", "candidates=12"),
        ("index --entries 8", "at least 16"),
        ("serve --chunks 3 --corpus 2", "corpus=2"),
        ("serve --url http://127.0.0.1:9", "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_refused(command: str, word: str) -> None:
    result: Any = run(f"bench {command}", code=2)
    assert word in result.stderr
