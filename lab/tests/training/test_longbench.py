"""The held-out questions in LongBench's format are read by what reads LongBench."""

import json
import sys
from pathlib import Path

import pytest

from cacheblend_lab.eval.datasets import load_task
from cacheblend_lab.training.corpus import NOTES, eval_examples
from cacheblend_lab.training.longbench import MADE_SUBTASKS, longbench_records, main
from cacheblend_rag.errors import ConfigError


def test_records_of_other_subtasks_are_not_made() -> None:
    with pytest.raises(ConfigError, match="'gov_report' cannot be made; choose one of hotpotqa, qmsum"):
        next(longbench_records("gov_report", 1))


def test_records_are_read_as_the_subtasks_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["longbench", "--out", str(tmp_path), "--questions", "11", "--seed", "3"])
    main()
    examples = eval_examples(11, 3, style=NOTES)
    asked = [(example, question) for example in examples for question in example.questions]
    assert len(asked) == 11 and len(examples) > 1
    for subtask, metric in zip(MADE_SUBTASKS, ("f1", "rouge_l"), strict=True):
        task = load_task("longbench", tmp_path, subtask=subtask, whole=True)
        assert next(iter(task.metrics)) == metric
        read = [(context, question) for context in task.contexts for question in context.questions]
        assert len(read) == len(asked)
        for (example, wanted), (context, question) in zip(asked, read, strict=True):
            assert question.text == wanted.text
            assert question.answers == ((wanted.answer,) if subtask == "hotpotqa" else (wanted.sentence,))
            if subtask == "hotpotqa":
                assert [text.partition("\n")[2] for text in context.texts] == list(example.chunks)
            else:
                assert context.texts == ("\n".join(example.chunks),)
        first = json.loads((tmp_path / f"{subtask}.jsonl").read_text().splitlines()[0])
        assert first["length"] == len(first["context"].split())
