"""Each method against what it is by definition: prefix caching is full prefill, the baselines run on a real model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cacheblend_lab.eval import (
    EvalMethod,
    EvalSetting,
    evaluate,
    grid_methods,
    parse_method,
    parse_methods,
    reference_task,
)
from cacheblend_lab.eval.asking import Asker
from cacheblend_lab.eval.inquiry import Inquiry
from cacheblend_lab.eval.journal import parse_asked
from cacheblend_lab.eval.prefix import PrefixCache
from cacheblend_lab.eval.ways import _PromptCache, budget_for_charge, make_way
from cacheblend_lab.settings import engine_settings
from cacheblend_lab.training.corpus import NOTES
from cacheblend_lab.training.questions import KINDS
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import selector_names
from lab.tests.eval.datasets.files import jsonl, longbench
from tests.command import run
from tests.families import CASES, sampled, tiny_model, tiny_tokenizer, words

TASK = replace(
    reference_task(1, style=NOTES), head=f"{words(4, 1)} ", tail=f" {words(3, 2)} {{question}}", separator=" t7 "
)


@pytest.mark.parametrize(("family", "attention"), sampled(CASES))
def test_prefix_caching_answers_like_full_prefill(family: str, attention: str) -> None:
    model, tokenizer = tiny_model(family, attention), tiny_tokenizer()
    with BlendEngine(model, tokenizer, **engine_settings(strict=True)) as engine:
        engine.add([Chunk(words(20, seed), f"n{seed}") for seed in range(3)])
        inquiry = Inquiry(TASK, ("n0", "n1", "n2"), words(5, 9), 8)
        [full] = make_way(parse_method("full"), engine).answer([inquiry], [{}])
        [prefix] = make_way(parse_method("prefix"), engine).answer([inquiry], [{}])
        assert full is not None and prefix is not None
        assert (prefix.text, prefix.output_tokens) == (full.text, full.output_tokens)
        assert prefix.charged_ratio == pytest.approx(2 / 3)
        ids = engine.prompt_ids(inquiry.prompt)
        rest = torch.tensor([ids[24:]])
        behind = PrefixCache(model, ids[:24]).logits(rest)
        own = engine.prefill(inquiry.prompt, blend=engine.blend.replace(enabled=False)).logits
        assert (behind - own).abs().max() < 1e-4


def test_the_baselines_on_the_reference_model(tmp_path: Path) -> None:
    task = reference_task(2, style=NOTES)
    setting = EvalSetting(
        methods=parse_methods("prefix, map_reduce, map_rerank, hkvd @0.2, hkvd @0.01, random = hkvd @0.2"),
        resamples=20,
    )
    journal = tmp_path / "answers.jsonl"
    with BlendEngine.from_pretrained("reference", **engine_settings(device="cpu")) as engine:
        result = evaluate(engine, "reference", task, setting, journal=journal)
    rows = {row.method: row for row in result.rows if row.kind == "all"}
    assert rows["prefix"].same_as_full == 1.0
    for name in ("map_reduce", "map_rerank"):
        assert (rows[name].charged_ratio, rows[name].recompute_ratio) == (None, None)
    for line in journal.read_bytes().splitlines()[1:]:
        asked = parse_asked(line)
        assert asked is not None
        full, rerank, reduce = (asked.answers[name] for name in ("full", "map_rerank", "map_reduce"))
        assert full is not None and rerank is not None and reduce is not None
        assert rerank.text.strip() and reduce.text.strip()
        # Both wait for an answer from each of at least twelve chunks.
        assert min(rerank.ttft_s, reduce.ttft_s) > full.ttft_s
    token = 1 / 150
    assert rows["hkvd @0.2"].charged_ratio == pytest.approx(0.2, abs=token)
    assert rows["random = hkvd @0.2"].charged_ratio == pytest.approx(0.2, abs=token)
    cheap = rows["hkvd @0.01"]
    assert (cheap.questions, cheap.unreached, cheap.metrics, cheap.ttft_s) == (0, 2, {}, None)


@pytest.mark.parametrize("charge", [0.0, 0.004, 0.05, 0.151, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("shape", ["proportional", "fixed cost", "steps", "curve", "cheap"])
def test_the_budget_of_a_charge_is_the_nearest(shape: str, charge: float) -> None:
    count = 733
    charges: Callable[[int], float] = {
        "proportional": lambda k: k / count,
        "fixed cost": lambda k: 0.1 + 0.9 * k / count,
        "steps": lambda k: (k // 10 * 10) / count,
        "curve": lambda k: (k / count) ** 2,
        "cheap": lambda k: 0.5 * k / count,
    }[shape]
    measured: list[int] = []

    def measure(tokens: int) -> float:
        measured.append(tokens)
        return charges(tokens)

    found = budget_for_charge(charge, count, measure)
    if charges(1) > charge + 1 / count:
        assert found is None
        return
    assert found is not None
    best = min(abs(charges(k) - charge) for k in range(1, count + 1))
    assert abs(charges(found) - charge) <= max(best, 0.5 / count) + 1e-12
    assert len(measured) <= (4 if shape in ("proportional", "fixed cost") else 24)
    assert all(1 <= tokens <= count for tokens in measured)


def test_a_question_with_braces_stays_as_it_is() -> None:
    inquiry = Inquiry(replace(reference_task(1, style=NOTES), tail="{x} {question} {"), (), "{y}", 1)
    assert inquiry.tail == "{x} {y} {"


def test_names_and_settings() -> None:
    assert parse_method("full").way == "full"
    assert parse_method("reuse").overrides == {"selector": "none", "recompute_ratio": 0.0}
    hkvd = parse_method("  hkvd   0.15 deviation=key check_layers=[1,2] ")
    assert hkvd.name == "hkvd 0.15 deviation=key check_layers=[1,2]"
    assert hkvd.overrides == {"selector": "hkvd", "recompute_ratio": 0.15, "deviation": "key", "check_layers": [1, 2]}
    assert parse_method("prompt_cache").settings()["selector"] == "none"
    assert (parse_method("hkvd @0.1").charge, parse_method("random = hkvd @0.1").equal_to) == (0.1, "hkvd @0.1")
    for name in selector_names():
        assert parse_method(f"{name} 0.3").overrides["selector"] == name
    listed = parse_methods("full, hkvd 0.15 check_layers=[1,2] deviation=both, reuse,")
    assert [method.way for method in listed] == ["full", "blend", "blend"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best 0.1", "method 'best 0.1' is unknown; write full, no_context, prefix"),
        ("", "is unknown"),
        ("hkvd", "wants a ratio or a charge"),
        ("hkvd 0.1 0.2", "wants a ratio or a charge"),
        ("hkvd 1.5", "'1.5' must be a number from 0"),
        ("hkvd @nan", "'nan' must be a number from 0"),
        ("hkvd @much", "'much' must be a number"),
        ("hkvd 0.1 depth=3", "the unknown setting 'depth'"),
        ("full deviation=key", "full blends nothing"),
        ("random = full", "full blends nothing"),
        ("random = best 0.1", "method 'best 0.1' is unknown"),
        ("prompt_cache 0.15", "unknown"),
    ],
)
def test_what_is_no_method(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_method(text)


def test_the_order_in_which_they_are_asked() -> None:
    named = parse_methods("random = hkvd 0.3, reuse, hkvd 0.3, full, reuse")
    assert [method.name for method in EvalSetting(named).methods] == ["full", "reuse", "hkvd 0.3", "random = hkvd 0.3"]
    with pytest.raises(ConfigError, match=r"needs the charge of 'hkvd 0\.3', which is not among the methods"):
        EvalSetting(parse_methods("random = hkvd 0.3"))
    with pytest.raises(ConfigError, match="two methods are named 'reuse'"):
        EvalSetting((EvalMethod("reuse", overrides={"seed": 1}), parse_method("reuse")))
    circle = (EvalMethod("a", equal_to="b"), EvalMethod("b", equal_to="a"))
    with pytest.raises(ConfigError, match="a, b take their charge from each other"):
        EvalSetting(circle)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        EvalSetting((), max_new_tokens=0)


def test_the_head_and_documents_are_modules_and_all_else_is_computed() -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(strict=True)) as engine:
        texts = tuple(words(20, seed) for seed in range(3))
        engine.add([Chunk(text, f"n{seed}") for seed, text in enumerate(texts)])
        inquiry = Inquiry(TASK, ("n0", "n1", "n2"), words(5, 9), 4, texts)
        way = make_way(parse_method("prompt_cache"), engine)
        assert isinstance(way, _PromptCache)
        layout = engine.prompt_layout(way._prompt(inquiry))
        # The same tokens at the same positions as the uncached prompt.
        assert layout.token_ids == engine.prompt_ids(inquiry.prompt)
        assert layout.positions == tuple(range(len(layout)))
        assert [len(span) for span in layout.chunks] == [4, 20, 1, 20, 1, 20]
        [answer] = way.answer([inquiry], [{}])
        assert answer is not None and (answer.charged_ratio, answer.recompute_ratio) == (0.0, 0.0)
        # With every module's token recomputed, cached and uncached are one.
        [one] = make_way(parse_method("prompt_cache selector=full recompute_ratio=1.0"), engine).answer([inquiry], [{}])
        [full] = make_way(parse_method("full"), engine).answer([inquiry], [{}])
        assert one is not None and full is not None and one.text == full.text


@pytest.mark.parametrize(("subtask", "metric"), [("hotpotqa", "f1"), ("gov_report", "rouge_l")])
def test_longbench_documents_cached_against_uncached(subtask: str, metric: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / f"{subtask}.jsonl", [longbench(subtask, number) for number in range(2)])
    figures = tmp_path / "figures.json"
    options = "--whole-documents --methods prompt_cache --workers 1 --max-new-tokens 5"
    run("eval longbench", file, *options.split(), "--ratios", "", "--json", figures)
    rows = [row for row in json.loads(figures.read_text())["rows"] if row["kind"] == "all"]
    assert [row["method"] for row in rows] == ["full", "prompt_cache"]
    assert all(metric in row["metrics"] for row in rows), rows[0]
    assert [row["charged_ratio"] for row in rows] == [1.0, 0.0]


PEOPLE = replace(reference_task(9, style=NOTES), max_new_tokens=4)
SETTING = EvalSetting(methods=(*parse_methods("reuse"), *grid_methods(["hkvd"], [0.15])), resamples=50)


def test_the_rows(engine: BlendEngine) -> None:
    seen: list[tuple[int, int]] = []
    result = evaluate(engine, "unused", PEOPLE, SETTING, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (9, 9)
    methods = ["full", "reuse", "random 0.15", "hkvd 0.15", "random = hkvd 0.15"]
    rows = result.rows
    assert [row.method for row in rows if row.kind == "all"] == methods
    kinds = {question.kind for context in PEOPLE.contexts for question in context.questions}
    assert {row.kind for row in rows} == {"all", *kinds}
    assert kinds <= set(KINDS)
    for row in rows:
        assert 0 <= row.metrics["exact_match"].mean <= row.metrics["f1"].mean <= 1
        for interval in (*row.metrics.values(), *row.minus_full.values()):
            assert interval.low <= interval.mean <= interval.high
    for method in methods:
        chosen = [row for row in rows if row.method == method]
        assert sum(row.questions for row in chosen if row.kind != "all") == 9
    full, reuse, random, hkvd, equal = rows[:5]
    assert (full.charged_ratio, full.same_as_full, full.recompute_ratio) == (1.0, 1.0, None)
    assert (full.speedup, full.minus_full["f1"].mean) == (1.0, 0.0)
    assert (reuse.charged_ratio, reuse.recompute_ratio) == (0.0, 0.0)
    assert random.charged_ratio == pytest.approx(0.15, abs=0.005)
    assert hkvd.charged_ratio is not None and hkvd.charged_ratio > 0.25
    assert equal.charged_ratio == pytest.approx(hkvd.charged_ratio, abs=0.005)
    assert equal.recompute_ratio == pytest.approx(hkvd.charged_ratio, abs=1e-9)
    assert (result.resampled, result.skipped) == ("contexts", {})


def test_two_processes_find_what_one_finds(engine: BlendEngine, model_folder: Path) -> None:
    task = replace(reference_task(10, style=NOTES), max_new_tokens=3)
    one = evaluate(engine, str(model_folder), task, SETTING)
    two = evaluate(engine, str(model_folder), task, SETTING, workers=2)
    for a, b in zip(one.rows, two.rows, strict=True):
        assert (a.kind, a.method, a.questions) == (b.kind, b.method, b.questions)
        assert (a.metrics, a.minus_full, a.same_as_full) == (b.metrics, b.minus_full, b.same_as_full)
        assert a.charged_ratio == pytest.approx(b.charged_ratio)


def test_a_batch_finds_what_one_question_at_a_time_finds(engine: BlendEngine) -> None:
    methods = parse_methods("prefix, reuse, hkvd 0.15, hkvd @0.7, random = hkvd 0.15, query 0.15")
    context = PEOPLE.contexts[0]
    setting = EvalSetting(methods=methods)
    alone = list(Asker(engine, PEOPLE, setting).ask(context))
    together = list(Asker(engine, PEOPLE, replace(setting, together=True)).ask(context))
    assert len(together) > 1
    assert [each.question for each in together] == [each.question for each in alone]
    for one, other in zip(alone, together, strict=True):
        for name, answer in one.answers.items():
            found = other.answers[name]
            assert answer is not None and found is not None
            # Only what is a call of the engine is in a batch.
            assert (found.ttft_s is None) == (name != "prefix")
            assert replace(found, ttft_s=None) == replace(answer, ttft_s=None)
    result = evaluate(engine, "unused", replace(PEOPLE, contexts=(context,)), replace(setting, together=True))
    times = {row.method: (row.ttft_s is None, row.speedup) for row in result.rows if row.kind == "all"}
    assert times["full"] == times["hkvd 0.15"] == (True, None)
    assert times["prefix"] == (False, None)
