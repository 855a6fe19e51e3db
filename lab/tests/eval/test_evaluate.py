"""The runner: what is skipped is counted, what is empty is wrong, a run that is cut off ends like another, and is drawn."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from cacheblend_lab.eval import (
    EvalContext,
    EvalQuestion,
    EvalSetting,
    EvalTask,
    RetrievalSetting,
    evaluate,
    parse_methods,
    plots,
    reference_task,
)
from cacheblend_lab.eval.inside import TokenOverlap
from cacheblend_lab.eval.inside_figures import draw_overlap
from cacheblend_lab.eval.journal import Answer, Asked, Journal
from cacheblend_lab.eval.metrics import _rouge_scorer, best_f1
from cacheblend_lab.eval.retrieve import Retriever
from cacheblend_lab.families.tiny import tiny_config, tiny_model
from cacheblend_lab.figures import save_figure
from cacheblend_lab.training.corpus import NOTES
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from tests.command import run
from tests.families import tiny_tokenizer, words

TASK = replace(reference_task(6, style=NOTES), max_new_tokens=3)
SETTING = EvalSetting(parse_methods("reuse"), resamples=10)


def _asked(text: str, number: int) -> EvalContext:
    return EvalContext((text,), (EvalQuestion(f"long {number}", "Why?", ("Oslo",)),))


def test_what_does_not_fit_is_skipped_and_counted(engine: BlendEngine) -> None:
    long = _asked("She lives in Oslo. " * 900, 0)
    # Each chunk fits, all of them together do not.
    wide = replace(_asked("", 1), texts=tuple(f"She keeps {number} goats. " * 40 for number in range(12)))
    empty = replace(_asked("", 2), texts=("", " "))
    result = evaluate(engine, "", replace(TASK, contexts=(long, *TASK.contexts, wide, empty)), SETTING)
    assert result.questions == 9
    assert sorted(result.skipped.values()) == [1, 1, 1]
    reasons = " ".join(result.skipped)
    assert "split it" in reasons and "retrieve fewer or shorter chunks" in reasons and "has no text" in reasons
    assert result.rows[0].questions == 6
    assert engine.ids() == []
    with pytest.raises(ConfigError, match=r"all 2 questions of reference were skipped; the first because .* split it"):
        evaluate(engine, "", replace(TASK, contexts=(long, empty)), SETTING)


def test_an_empty_answer_is_wrong_and_no_crash(engine: BlendEngine) -> None:
    def per_letter(answer: str, golds: tuple[str, ...]) -> float:
        return 1 / len(answer.strip())

    task = replace(TASK, metrics={"per_letter": per_letter}, extract=lambda answer: "")
    result = evaluate(engine, "", task, SETTING)
    assert {row.metrics["per_letter"].mean for row in result.rows} == {0.0}


def test_a_model_that_cannot_be_blended_is_evaluated_without() -> None:
    model = tiny_model(tiny_config("gpt_neo", vocab_size=97, max_position_embeddings=512))
    question = EvalQuestion("q", words(3, 1), (words(1, 2),))
    context = EvalContext(tuple(words(9, seed) for seed in range(3)), (question,))
    task = EvalTask("words", (context,), {"f1": best_f1}, chunked=True, separator=" ", max_new_tokens=3)
    whole = EvalSetting(parse_methods("prefix, map_reduce, map_rerank"), resamples=10)
    with BlendEngine(model, tiny_tokenizer()) as engine:
        with pytest.raises(UnsupportedModelError, match=r"evaluate it by full, no_context, prefix"):
            evaluate(engine, "", task, SETTING)
        rows = evaluate(engine, "", task, whole).rows
    assert [row.method for row in rows] == ["full", "prefix", "map_reduce", "map_rerank"]
    assert rows[1].same_as_full == 1.0


def test_chunks_are_cut_and_the_nearest_retrieved(engine: BlendEngine) -> None:
    texts = (
        "The light tower stands on a rock far out in the sea. " * 3,
        "Bread is baked from flour, water and salt. " * 3,
        "A grey goat eats grass on the hill. " * 3,
    )
    context = EvalContext(texts, (EvalQuestion("q", "How is bread made?", ("salt",)), EvalQuestion("r", "", ("goat",))))
    setting = RetrievalSetting(chunk_tokens=60, top_k=2)
    retriever = Retriever(engine.tokenizer, setting)
    chunks, sizes, rows = retriever.retrieve(context)
    assert len(sizes) == 3 and sum(sizes) == len(chunks)
    lengths = [len(engine.tokenizer(chunk, add_special_tokens=False)["input_ids"]) for chunk in chunks]
    assert max(lengths) <= 60
    assert "".join("".join(texts).split()) == "".join("".join(chunks).split())
    assert "read" in chunks[rows[0][0]]
    assert rows[1] == [0, 1]
    task = EvalTask("bread", (context,), {"none": lambda answer, golds: 0.0}, tail="\n{question}", max_new_tokens=2)
    result = evaluate(engine, "", task, replace(SETTING, retrieval=setting))
    assert result.rows[0].questions == 2
    assert engine.ids() == []
    with pytest.raises(ConfigError, match="top_k=0"):
        RetrievalSetting(top_k=0)


def test_losses_say_how_likely_the_right_answer_is(engine: BlendEngine) -> None:
    setting = EvalSetting(parse_methods("reuse, hkvd 1, prompt_cache"), resamples=10, losses=True)
    full, bare, reuse, whole, pml = (row for row in evaluate(engine, "", TASK, setting).rows if row.kind == "all")
    assert [full.method, bare.method, reuse.method] == ["full", "no_context", "reuse"]
    assert bare.recovered is not None and full.recovered is not None and reuse.recovered is not None
    assert (bare.recovered.mean, full.recovered.mean) == (0, 1)
    assert bare.loss is not None and full.loss is not None and reuse.loss is not None
    assert reuse.recovered.mean == pytest.approx(
        (bare.loss.mean - reuse.loss.mean) / (bare.loss.mean - full.loss.mean), abs=1e-6
    )
    assert full.same_first == 1.0
    # Where all is recomputed it is full prefill.
    assert whole.loss is not None and whole.loss.mean == pytest.approx(full.loss.mean, abs=1e-4)
    assert pml.loss is None
    # The same by the model's own forward.
    losses = []
    for context in TASK.contexts:
        for question in context.questions:
            tail = TASK.tail.replace("{question}", question.text)
            right = question.answers[0] if tail[-1:].isspace() else f" {question.answers[0]}"
            ids = engine.tokenizer(right, add_special_tokens=False)["input_ids"]
            prompt = BlendPrompt(TASK.head, [Chunk(text) for text in context.texts], tail, TASK.separator)
            with torch.no_grad():
                logits = engine.model(torch.tensor([[*engine.prompt_ids(prompt), *ids]])).logits[0, -len(ids) - 1 : -1]
            losses.append(float(cross_entropy(logits, torch.tensor(ids))))
    assert full.loss.mean == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def _arguments(folder: Path, file: Path) -> list[str]:
    shared = f"--model {folder} --ratios 0.3 --max-new-tokens 4 --workers 1 --json {file}"
    return ["eval", "reference", "--questions", "10", *shared.split()]


def _timeless(file: Path) -> dict[str, Any]:
    """What a run found, without what differs between any two runs."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    for name in ("date", "seconds", "machine", "arguments"):
        del whole[name]
    for row in whole["rows"]:
        del row["ttft_s"], row["speedup"]
    return dict(whole)


def test_a_run_that_was_cut_off_ends_like_one_that_was_not(model_folder: Path, tmp_path: Path) -> None:
    file, journal = tmp_path / "eval.json", tmp_path / "eval.json.jsonl"
    run(*_arguments(model_folder, file))
    whole, lines = _timeless(file), journal.read_bytes().splitlines(keepends=True)
    # A head, four answers and a torn one.
    journal.write_bytes(b"".join([*lines[:5], lines[5][:20]]))
    assert "4 of them were taken from" in run(*_arguments(model_folder, file)).stdout
    assert _timeless(file) == whole
    result = run(*_arguments(model_folder, file), "--selectors", "hkvd,full", code=2)
    assert "holds answers of another evaluation: methods.full 0.3 is null there" in result.stderr


def test_the_command_writes_its_tables(model_folder: Path, tmp_path: Path) -> None:
    file, markdown = tmp_path / "eval.json", tmp_path / "eval.md"
    more = ["--markdown", markdown, "--charges", "0.01,0.5", "--codecs", "native,int4", "--plot", tmp_path / "plots"]
    result = run(*_arguments(model_folder, file), *more, "--questions", "4", "--methods", "full")
    assert (tmp_path / "plots" / "quality-against-ttft.png").stat().st_size > 1000
    assert "exact_match by kind of question" in result.stdout
    whole = json.loads(file.read_text())
    assert whole["setting"]["questions"] == 4
    assert all(row.keys() == whole["rows"][0].keys() for row in whole["rows"])
    by_method = {row["method"]: row for row in whole["rows"] if row["kind"] == "all"}
    names = ["full", "random 0.3", "hkvd 0.3", "random = hkvd 0.3", "hkvd 0.3 ram_codec=int4"]
    names += ["random @0.01", "hkvd @0.01", "random @0.5", "hkvd @0.5"]
    assert list(by_method) == names
    assert by_method["hkvd @0.5"]["charged_ratio"] == pytest.approx(0.5, abs=0.01)
    assert by_method["hkvd @0.01"]["metrics"] == {}
    table = markdown.read_text(encoding="utf-8").splitlines()
    assert table[0].startswith("# reference, ")
    [line] = [line for line in table if line.startswith("| hkvd @0.01 | 0 |")]
    assert line.count("n/a") == line.count("|") - 3
    head = next(line for line in table if line.startswith("| method | n |"))
    assert all(row.count("|") == head.count("|") for row in table if row.startswith("| full | 4 |"))


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("matplotlib", "reference --plot plots"),
        ("matplotlib", "figures --out plots"),
        ("rouge_score", "samsum {file} --model missing/model"),
    ],
)
def test_a_missing_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    _rouge_scorer.cache_clear()
    dialogues = [{"id": str(n), "dialogue": f"Mara: I have {n} goats.", "summary": f"She has {n}."} for n in range(3)]
    (tmp_path / "samsum.json").write_text(json.dumps(dialogues))
    result = run(f"eval {command.format(file='samsum.json')}", code=2)
    assert 'pip install "cacheblend-rag[lab]"' in result.stderr
    assert not result.stdout


def test_needles_are_drawn(model_folder: Path, tmp_path: Path) -> None:
    sizes = "--questions 1 --lengths 200 --depths 0,1 --chunk-tokens 100 --max-new-tokens 2 --workers 1"
    result = run(f"eval needle {sizes}", "--model", model_folder, "--plot", tmp_path, "--ratios", "")
    assert "2 of 2 questions answered" in result.stdout
    assert (tmp_path / "needle.png").exists()


HEADER = {"task": "t", "model": "m", "methods": {"full": {"way": "full"}}}
ASKED = [
    Asked("q1", {"full": Answer("Oslo\u2028 \r\n", 1.0, None, 0.25, 3), "hkvd @0.1": None}),
    Asked("q2", skipped="too long"),
    Asked("q\n3", {"full": Answer("", None, 0.5, 0.0, 0)}),
]


def write(path: Path) -> bytes:
    with Journal(path, HEADER) as journal:
        for each in ASKED:
            journal.append(each)
    return path.read_bytes()


def test_a_run_ends_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    held = write(path)
    for length in range(len(held)):
        path.write_bytes(held[:length])
        with Journal(path, HEADER) as journal:
            known = list(journal.asked.values())
            assert known == ASKED[: len(known)]
            for each in ASKED[len(known) :]:
                journal.append(each)
        assert path.read_bytes() == held


def test_another_evaluation_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path)
    other = {"task": "t", "model": "n", "methods": {"full": {"way": "full"}, "reuse": {}}}
    with pytest.raises(ConfigError, match=r".*methods\.reuse is null there and \{\} here"):
        Journal(path, other)
    with Journal(path, other, fresh=True) as journal:
        assert journal.asked == {}
    path.write_text("dear diary\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a journal of an evaluation"):
        Journal(path, HEADER)
    path.write_text("dear diary", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a journal of an evaluation"):
        Journal(path, HEADER)
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path, HEADER)


def test_a_question_of_another_evaluation_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path)
    with Journal(path, HEADER, expected=lambda asked: asked.question != "q2") as journal:
        assert (list(journal.asked), journal.damaged) == (["q1", "q\n3"], 1)


def lines_of(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in axes.lines}


def saved(figure: Any, folder: Path) -> Any:
    """The figure's first axes; the file must be one."""
    assert save_figure(figure, folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    return figure.axes[0]


def test_quality_against_ttft(tmp_path: Path) -> None:
    blend = [plots.Quality(0.5, 0.4, 0.6, ttft_s=0.1, note="5 %"), plots.Quality(0.55, ttft_s=0.2)]
    methods = {"blend": blend, "full": [plots.Quality(0.6, ttft_s=1.0)]}
    figure = plots.draw_quality_against_ttft({"musique": methods, "samsum": {"full": methods["full"]}})
    left = saved(figure, tmp_path)
    assert lines_of(left) == {"blend": [(0.1, 0.5), (0.2, 0.55)], "full": [(1.0, 0.6)]}
    assert [text.get_text() for text in left.texts] == ["5 %"]
    assert left.collections[0].get_segments()[0].tolist() == [[0.1, 0.4], [0.1, 0.6]]
    right = figure.axes[1]
    assert (left.get_title(), right.get_title()) == ("musique", "samsum")
    assert right.lines[0].get_color() == left.lines[1].get_color(), "a method has one colour in all panels"
    with pytest.raises(ConfigError, match="no ttft_s"):
        plots.draw_quality_against_ttft({"musique": {"full": [plots.Quality(0.6)]}})


def test_the_overlap_of_attention_and_recomputed_tokens(tmp_path: Path) -> None:
    attention = np.array([[0.5, 0.0, 0.3, 0.2], [0.1, 0.0, 0.8, 0.1]])
    seen = TokenOverlap(attention, {"hkvd": np.array([1, 2]), "a3": np.array([0, 2]), "none": np.array([], int)}, top=2)
    assert seen.high_attention.tolist() == [0, 2]
    assert [seen.hit_rate(method) for method in seen.recomputed] == [0.5, 1.0, 0.0]
    figure = draw_overlap(seen)
    above = saved(figure, tmp_path)
    assert np.asarray(above.images[0].get_array()) == pytest.approx(np.sqrt(attention))
    _, below = figure.axes
    rows = np.asarray(below.images[0].get_array())
    assert rows.tolist() == [[1, 0, 1, 0], [0, 0.35, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert [label.get_text() for label in below.get_yticklabels()][1] == "hkvd: 50% hit"
    with pytest.raises(ConfigError, match="top=5"):
        TokenOverlap(attention, {}, top=5)
    with pytest.raises(ConfigError, match="recomputes tokens 3 to 4"):
        TokenOverlap(attention, {"hkvd": np.array([3, 4])}, top=1)


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plots.draw_attention_loss({})
    with pytest.raises(ConfigError, match="nothing to draw for 'hkvd'"):
        plots.draw_kv_deviation({"hkvd": []})
    figure = plots.draw_attention_loss({"hkvd": [1.0]})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(figure, tmp_path / "file" / "figure.png")
