"""Prompt Cache's own evaluation: documents as modules, the words around them computed, cached against uncached."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_lab.eval import parse_method, reference_task
from cacheblend_lab.eval.inquiry import Inquiry
from cacheblend_lab.eval.ways import _PromptCache, make_way
from cacheblend_lab.settings import engine_settings
from cacheblend_lab.training.corpus import NOTES
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError
from lab.tests.eval.datasets.files import jsonl, longbench
from tests.command import run
from tests.families import tiny_model, tiny_tokenizer, words


def test_documents_are_modules_and_all_else_is_computed() -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(strict=True)) as engine:
        task = replace(
            reference_task(1, style=NOTES),
            head=f"{words(4, 1)} ",
            tail=f" {words(3, 2)} {{question}}",
            separator=" t7 ",
        )
        texts = tuple(words(20, seed) for seed in range(3))
        engine.add([Chunk(text, f"n{seed}") for seed, text in enumerate(texts)])
        inquiry = Inquiry(task, ("n0", "n1", "n2"), words(5, 9), 4, texts)
        way = make_way(parse_method("prompt_cache"), engine)
        assert isinstance(way, _PromptCache)
        layout = engine.prompt_layout(way._prompt(inquiry))
        # The same tokens at the same positions as the uncached prompt.
        assert layout.token_ids == engine.prompt_ids(inquiry.prompt)
        assert layout.positions == tuple(range(len(layout)))
        assert [len(span) for span in layout.chunks] == [20, 1, 20, 1, 20]
        [answer] = way.answer([inquiry], [{}])
        assert answer is not None and (answer.charged_ratio, answer.recompute_ratio) == (0.0, 0.0)
        # With every module's token recomputed, cached and uncached are one.
        [whole] = make_way(parse_method("prompt_cache selector=full recompute_ratio=1.0"), engine).answer(
            [inquiry], [{}]
        )
        [full] = make_way(parse_method("full"), engine).answer([inquiry], [{}])
        assert whole is not None and full is not None and whole.text == full.text


def test_a_ratio_does_not_belong_to_it() -> None:
    assert parse_method("prompt_cache").settings()["selector"] == "none"
    with pytest.raises(ConfigError, match="unknown"):
        parse_method("prompt_cache 0.15")


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
