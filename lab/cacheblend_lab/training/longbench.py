"""The held-out questions as files in LongBench's format: ``python -m cacheblend_lab.training.longbench --out DIR``.

What reads LongBench reads them too, so its subtasks can be run with the reference model, which knows nothing of its texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheblend_lab.training.corpus import NOTES, eval_examples
from cacheblend_rag.errors import ConfigError

__all__ = ["MADE_SUBTASKS", "longbench_records"]

MADE_SUBTASKS = ("hotpotqa", "qmsum")
"""The subtasks that records can be made for: the value asked for, out of passages; and the answer's sentence, out of one text."""


def longbench_records(subtask: str, num_questions: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Yield held-out questions as records of one of :data:`MADE_SUBTASKS`.

    Every chunk is a passage of "hotpotqa", and a line of the text of "qmsum".
    """
    if subtask not in MADE_SUBTASKS:
        raise ConfigError(f"records of subtask {subtask!r} cannot be made; choose one of {', '.join(MADE_SUBTASKS)}")
    for number, example in enumerate(eval_examples(num_questions, seed, 12, NOTES)):
        if subtask == "hotpotqa":
            context = "\n\n".join(f"Passage {place}:\n{chunk}" for place, chunk in enumerate(example.chunks, 1))
        else:
            context = "\n".join(example.chunks)
        for place, question in enumerate(example.questions):
            yield {
                "_id": f"{seed}-{number}-{place}",
                "dataset": subtask,
                "input": question.text,
                "context": context,
                "answers": [question.answer if subtask == "hotpotqa" else question.sentence],
                "all_classes": None,
                "language": "en",
                "length": len(context.split()),
            }


def main() -> None:
    """Write a file for each subtask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets SUBTASK.jsonl")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for subtask in MADE_SUBTASKS:
        lines = (json.dumps(record) + "\n" for record in longbench_records(subtask, given.questions, given.seed))
        (given.out / f"{subtask}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
