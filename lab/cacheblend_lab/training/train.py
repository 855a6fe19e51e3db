"""Train the reference model: ``python -m cacheblend_lab.training.train --out DIR``.

Every batch follows from the seed and the step's number, and a checkpoint holds everything else, so that a resumed run
goes on as if it had not been interrupted (to the bit on the same number of threads). ``--resume`` goes on from
``DIR/checkpoint.pt``. Nothing is steered by hand: a stage ends when its goal is reached or its steps are spent, the run after the
steps of the last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cacheblend_lab.training.curriculum import COPY_LENGTHS
from cacheblend_lab.training.scoring import export
from cacheblend_lab.training.trainer import Options, Trainer

__all__ = ["main", "run"]

_CHECK_EVERY = 50
# A checkpoint is written after this many steps or seconds, whichever comes first.
_SAVE_STEPS = 50
_SAVE_S = 300.0


def run(trainer: Trainer, out: Path, export_to: Path | None = None, export_questions: int = 500) -> None:
    """Train until the last step, writing ``log.jsonl`` and ``checkpoint.pt`` into `out`."""
    began = saved = time.perf_counter()
    losses: list[float] = []
    while trainer.end_step is None or trainer.step < trainer.end_step:
        losses.append(trainer.train_step())
        if trainer.step % _CHECK_EVERY == 0:
            seconds = time.perf_counter() - began
            stage = trainer.stages[trainer.stage]
            copy_length = COPY_LENGTHS[trainer.copying] if stage.style is None else None
            held_out = trainer.check()
            record: dict[str, Any] = {
                "step": trainer.step,
                "stage": stage.name,
                "copy_length": copy_length,
                "loss": round(sum(losses) / len(losses), 4),
                "seconds": round(seconds, 1),
            }
            for order, scores in held_out.items():
                key = "held_out" if order == "reading" else f"held_out_{order}"
                record[key] = {kind: round(value, 3) for kind, value in scores.items()}
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
            began, losses = time.perf_counter(), []
        if trainer.step % _SAVE_STEPS == 0 or time.perf_counter() - saved >= _SAVE_S:
            trainer.save(out / "checkpoint.pt")
            saved = time.perf_counter()
    trainer.save(out / "checkpoint.pt")
    if export_to is not None:
        export(trainer.model, trainer.tokenizer, export_to, trainer.step, out / "log.jsonl", export_questions)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint and log")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument(
        "--begin-from", type=Path, help="folder of exported weights to train further, without a checkpoint"
    )
    parser.add_argument("--export", type=Path, help="folder that gets the weights, as the package ships them")
    parser.add_argument(
        "--export-questions", type=int, default=500, help="questions the exported scores are measured on"
    )
    parser.add_argument("--threads", type=int, help="torch threads")
    for name, value in asdict(Options()).items():
        flag = f"--{name.replace('_', '-')}"
        # The options without a default are whole numbers.
        parser.add_argument(flag, type=int if value is None else type(value), default=value)
    parsed = vars(parser.parse_args(arguments))
    out, resume, export_to = parsed.pop("out"), parsed.pop("resume"), parsed.pop("export")
    weights = parsed.pop("begin_from")
    export_questions, threads = parsed.pop("export_questions"), parsed.pop("threads")
    if threads is not None:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Options(**parsed))
    if weights is not None:
        trainer.begin_from(weights)
    if resume and (out / "checkpoint.pt").exists():
        trainer.load(out / "checkpoint.pt")
        _forget_after(out / "log.jsonl", trainer.step)
    run(trainer, out, export_to, export_questions)


def _forget_after(log: Path, step: int) -> None:
    """Remove what a run wrote after its last checkpoint, for it is about to be done again."""
    if log.exists():
        # A run that was killed while it wrote leaves half a line, the last.
        lines = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


if __name__ == "__main__":
    main()
