"""What is measured inside the model is what a naive computation gives."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from cacheblend_attachments import watch_prefill
from cacheblend_lab.eval import EvalContext, EvalQuestion, EvalTask
from cacheblend_lab.eval.inside import PromptInside
from cacheblend_lab.eval.inside_result import InsideSetting, look_inside
from cacheblend_lab.eval.metrics import best_f1
from cacheblend_lab.eval.runs import read_runs
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from tests.command import run
from tests.core.dense import _FixedRows, own_kv, read_behind, stale_kv
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(9 + number, number), f"n{number}") for number in range(4)]
PROMPT = BlendPrompt(words(3, 20), [chunk.id for chunk in CHUNKS], words(5, 21), separator=" ")
# Families with windows, soft caps and biases of their own, under both implementations.
CASES = [("llama", "sdpa"), ("mistral", "eager"), ("gemma2", "eager"), ("qwen3", "sdpa")]


@pytest.fixture(params=CASES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[BlendEngine]:
    with BlendEngine(tiny_model(*request.param), tiny_tokenizer(), **engine_settings(device="cpu")) as engine:
        engine.add(CHUNKS)
        yield engine


def _attentions(model: PreTrainedModel, ids: list[int], cache: Any = None) -> list[torch.Tensor]:
    """The model's own attention matrices, every row through every layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            whole = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return [each[0] for each in whole.attentions]


def _naive(engine: BlendEngine, inside: PromptInside, rows: torch.Tensor) -> list[float]:
    """Attention deviation with some rows recomputed, from dense matrices."""
    layout, model = inside.layout, engine.model
    ids, spans = list(layout.token_ids), [(span.start, span.stop) for span in layout.chunks]
    stale = stale_kv(model, ids, spans, read_behind(engine, PROMPT))
    blended = _attentions(model, ids, _FixedRows(stale, layout.context_rows, rows))
    full = _attentions(model, ids)
    question = slice(spans[-1][1], len(ids))
    return [float((a - b)[:, question][:, :, layout.context_rows].norm()) for a, b in zip(blended, full, strict=True)]


def test_attention_deviation_is_that_of_dense_matrices(engine: BlendEngine) -> None:
    inside = PromptInside(engine, PROMPT)
    assert inside.reuse.attention_deviation == pytest.approx(_naive(engine, inside, torch.arange(0)), abs=1e-4)
    assert inside.reuse.attention_deviation.max() > 0.05
    settings = {"selector": "random", "recompute_ratio": 0.3}
    drawn = inside.blended(settings)
    rows = inside.layout.context_rows[torch.from_numpy(drawn.recomputed)]
    assert len(rows) == inside.budget(0.3) == round(0.3 * inside.layout.context_tokens)
    assert drawn.attention_deviation == pytest.approx(_naive(engine, inside, rows), abs=1e-4)
    # The same rows given by hand are the same pass.
    given = watch_prefill(engine, PROMPT, lambda layer, call: None, rows=rows)
    asked = engine.prefill(PROMPT, blend=blend_settings(engine.blend, **settings))
    assert torch.equal(given.result.logits, asked.logits)
    assert given.result.report.selector == "given"
    assert given.result.report.charged_ratio == drawn.charged_ratio


def test_the_questions_attention_is_the_models_own(engine: BlendEngine) -> None:
    inside = PromptInside(engine, PROMPT)
    full = _attentions(engine.model, list(inside.layout.token_ids))
    question = slice(inside.layout.chunks[-1].stop, None)
    naive = torch.stack(full)[:, :, question][..., inside.layout.context_rows].mean(dim=(0, 1))
    assert inside.attention == pytest.approx(naive.numpy(), abs=1e-5)
    norms = [float(each[:, question][..., inside.layout.context_rows].norm()) for each in full]
    assert inside.attention_norm == pytest.approx(norms, abs=1e-4)
    best = inside.oracle("oracle_attention", 0.2)
    assert set(best.recomputed) == set(np.argsort(-naive.sum(dim=0).numpy())[: inside.budget(0.2)])
    assert inside.overlap({"best": best}, 0.2).hit_rate("best") == 1.0


def test_kv_deviation_is_that_of_stored_and_true_kv(engine: BlendEngine) -> None:
    inside = PromptInside(engine, PROMPT)
    layout, model = inside.layout, engine.model
    ids, spans = list(layout.token_ids), [(span.start, span.stop) for span in layout.chunks]
    stale = stale_kv(model, ids, spans, read_behind(engine, PROMPT))
    for layer, (old, true) in enumerate(zip(stale, own_kv(model, ids), strict=True)):
        if not layer:
            continue
        squares = [
            (a - b)[:, :, layout.context_rows].double().square().sum(dim=(0, 1, 3)).numpy()
            for a, b in zip(old, true, strict=True)
        ]
        naive = np.sqrt(sum(each / each.mean() for each in squares))
        assert inside.kv_deviation[layer] == pytest.approx(naive / naive.mean(), rel=1e-2, abs=1e-4)
    worst = inside.oracle("oracle_deviation", 0.1)
    assert set(worst.recomputed) == set(np.argsort(-inside.kv_deviation[1:].sum(axis=0))[: inside.budget(0.1)])


def test_the_figures_of_a_task() -> None:
    question = EvalQuestion("q", words(4, 30), (words(1, 2),))
    texts = tuple(words(9, seed) for seed in range(5))
    contexts = (
        EvalContext(texts, (question, EvalQuestion("r", words(4, 31), ("t5",)))),
        EvalContext(("",), (EvalQuestion("none", words(4, 33), ("t5",)),)),
    )
    task = EvalTask("words", contexts, {"f1": best_f1}, chunked=True, separator=" ", tail=" {question}")
    setting = InsideSetting(("hkvd check_layers=[1,2]", "random", "oracle_attention"), (0.0, 0.2, 1.0), 0.2)
    done: list[tuple[int, int]] = []
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(device="cpu", preamble="")) as engine:
        result = look_inside(engine, task, setting, lambda *counts: done.append(counts))
        assert engine.ids() == []
        engine.add([Chunk(text, f"chunk {number}") for number, text in enumerate(texts)])
        first = PromptInside(engine, BlendPrompt("", [f"chunk {n}" for n in range(5)], " " + question.text, " "))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert result.questions == ("q", "r")
    assert list(result.skipped.values()) == [1]
    rows = {(row.selector, row.ratio): row for row in result.rows}
    assert len(rows) == 1 + 3 * 3
    assert rows["reuse", 0.0].by_question[0] == pytest.approx(first.reuse.attention_deviation.mean())
    assert rows["reuse", 0.0].of_reuse == 1.0
    assert rows["random", 1.0].of_reuse == 0.0
    assert rows["random", 0.0].hit_rate is None
    assert rows["oracle_attention", 0.2].hit_rate == 1.0
    assert np.mean(rows["reuse", 0.0].by_layer) == pytest.approx(np.mean(rows["reuse", 0.0].by_question))
    assert all(one.low - 1e-9 <= one.median <= one.high + 1e-9 for one in result.correlation.values())
    assert list(result.correlation) == [1, 2, 3, 4]
    assert all(a <= b for values in result.kv_deviation.values() for a, b in pairwise(values))
    assert set(result.overlap.recomputed) == set(setting.selectors)


def test_what_cannot_be_looked_at_is_said() -> None:
    with pytest.raises(ConfigError, match=r"shown_ratio=0.15 among the ratios"):
        InsideSetting(ratios=(0.0, 1.0))
    with pytest.raises(ConfigError, match=r"method 'best 0' is unknown"):
        InsideSetting(selectors=("best",))
    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=97))
    with BlendEngine(model, tiny_tokenizer()) as engine, pytest.raises(UnsupportedModelError, match="nothing to"):
        PromptInside(engine, BlendPrompt("", ["t4 t5"], "t6"))
    with BlendEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        engine.add(CHUNKS)
        for rows in ([0], [40, 12], [12, 12]):
            with pytest.raises(ConfigError, match="each once and ascending"):
                watch_prefill(engine, PROMPT, lambda layer, call: None, rows=torch.tensor(rows))


def test_the_command_draws_and_writes(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    shared = ["--model", model_folder, "--questions", "2", "--ratios", "0,0.2,1", "--json", file]
    run("eval figures", "--out", tmp_path / "out", *shared)
    names = "attention-deviation attention-deviation-by-charge attention-loss attention-overlap kv-deviation"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{name}.svg" for name in [*names.split(), "rank-correlation"]
    }
    whole = json.loads(file.read_text(encoding="utf-8"))
    assert whole["setting"]["shown_ratio"] == 0.2
    assert {row["selector"] for row in whole["rows"]} == {"reuse", "hkvd", "random", "query"}
    assert list(whole["rank_correlation"]) == ["1", "2"]
    assert len(whole["kv_deviation"]["3"]) == 101
    wrong = run("eval figures --task musique", "--out", tmp_path, *shared, code=2)
    assert "is read from a file; name it by --data" in wrong.output


def test_runs_are_drawn_side_by_side(model_folder: Path, tmp_path: Path) -> None:
    files = []
    for people in (1, 2):
        files.append(tmp_path / f"eval-{people}.json")
        asked = f"eval reference --questions 2 --people {people} --min-chunks 1 --max-new-tokens 2 --workers 1"
        run(asked, "--model", model_folder, "--json", files[-1])
    for tokens in (16, 32):
        files.append(tmp_path / f"ttft-{tokens}.json")
        run(f"bench ttft --shape tiny --chunks 2 --repeats 1 --chunk-tokens {tokens}", "--json", files[-1])
    runs = read_runs(files, ["full", "reuse", "hkvd 0.15"])
    assert list(runs.quality) == list(runs.ttft_s) == ["full", "reuse", "hkvd 0.15"]
    chunks = [round(json.loads(file.read_text(encoding="utf-8"))["chunks"]) for file in files[:2]]
    assert list(runs.quality["full"]) == chunks
    assert chunks[0] < chunks[1]
    tokens = [json.loads(file.read_text(encoding="utf-8"))["setting"]["prompt_tokens"] for file in files[2:]]
    assert list(runs.ttft_s["full"]) == tokens
    run("eval draw", *files, "--out", tmp_path / "out", "--format", "png")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"quality-over-chunks.png", "ttft-over-length.png"}
    with pytest.raises(ConfigError, match="no method in common among best"):
        read_runs(files, ["best"])
    other = tmp_path / "other.json"
    other.write_text('{"command": "demo"}')
    with pytest.raises(ConfigError, match=r"other.json is not what"):
        read_runs([other])
