"""Train the reference model: ``python -m cacheblend_rag.lab.training.train --out DIR``.

Every batch follows from the seed and the step's number, and a checkpoint holds everything else, so that a resumed run
goes on as if it had not been interrupted (to the bit on the same number of threads). ``--resume`` goes on from
``DIR/checkpoint.pt``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_rag.lab.training.batch import BRANCHED, IGNORED, Batch, Row, collate, copy_batch, encode_example
from cacheblend_rag.lab.training.corpus import eval_examples, make_example, shuffle_example
from cacheblend_rag.lab.training.curriculum import COPY_LENGTHS, STAGES, Stage, brief_stages
from cacheblend_rag.lab.training.scoring import answer_logits, export, score
from cacheblend_rag.lab.training.tokenizer import MAX_LENGTH, build_tokenizer
from cacheblend_rag.lab.training.world import Style
from cacheblend_rag.reference.prompt import FORMATS

__all__ = ["Options", "Trainer", "build_model", "main"]

# Long system prompts cost much and teach little: that format is rare.
_FORMAT_WEIGHTS = {"chat": 6.0, "llama_index_system": 0.5}
_KIND_GROUPS = (("single", "pronoun"), ("two_hop",), ("comparison",))
_COPY_ROWS = 4
_GAP_SHARE = 0.3
_CHECK_EVERY = 50
_CHECK_QUESTIONS = 160
_MAX_GAP = 400


@dataclass(frozen=True)
class Options:
    """What a run is made with; the command line's arguments.

    Attributes
    ----------
    layers, hidden, heads, intermediate
        The model's sizes.
    lr, muon_lr
        Learning rates of AdamW (embeddings, norms, head) and of Muon (all other matrices).
    warmup
        Steps of linear warm-up.
    end_step
        If given, the learning rates fall linearly to zero over the last `decay` steps before this step, and training ends.
    seed
        Batches and initial weights follow from it.
    brief
        Whether answers are trained as values alone (:attr:`Style.brief`), and the last stage has contexts of up to five people
        who share fewer of their attributes.
    shuffled
        Share of the contexts whose chunks stand in random order, as a retriever may rank them, instead of reading order.
    stage
        The stage to begin with, for weights that are trained further.
    """

    layers: int = 16
    hidden: int = 128
    heads: int = 4
    intermediate: int = 320
    lr: float = 2e-3
    muon_lr: float = 0.01
    warmup: int = 100
    end_step: int | None = None
    decay: int = 1000
    seed: int = 1
    brief: bool = False
    shuffled: float = 0.0
    stage: int | None = None


def build_model(tokenizer: PreTrainedTokenizerFast, options: Options) -> LlamaForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(options.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden,
            intermediate_size=options.intermediate,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.heads,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=0.02,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class Trainer:
    """The training loop and its state.

    Parameters
    ----------
    options
        See :class:`Options`.
    stages
        The curriculum; tests pass a short one.
    device
        Where to compute.
    """

    def __init__(self, options: Options, stages: Sequence[Stage] = STAGES, device: torch.device | None = None) -> None:
        self.options = options
        self.stages = brief_stages(stages) if options.brief else tuple(stages)
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer, options)
        torch.nn.Module.to(self.model, self.device)
        self.model.set_attn_implementation(BRANCHED)
        matrices = [weight for name, weight in self.model.named_parameters() if weight.ndim == 2 and "layers" in name]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in self.model.parameters() if id(weight) not in chosen]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, options.muon_lr, weight_decay=0.0), options.muon_lr),
            (torch.optim.AdamW(others, options.lr, betas=(0.9, 0.98), weight_decay=0.0), options.lr),
        ]
        self.step = 0
        self.stage = options.stage or 0
        self.stage_began = 0
        self.copying = 0

    def batches(self, step: int) -> list[Batch]:
        """Return the parts of a step's batch; they follow from seed, step, stage and copying length.

        Questions of one part have about equally long answers, so that little is padding. Every part is in every step:
        were the kinds taken in turn, the model would sway between the sentences that it was asked for last.
        """
        rng = random.Random(f"{self.options.seed}:{step}")
        stage = self.stages[self.stage]
        if stage.style is None:
            return [copy_batch(rng, self.tokenizer, stage.rows, COPY_LENGTHS[self.copying])]
        groups = [tuple(kind for kind in group if kind in stage.style.kinds) for group in _KIND_GROUPS]
        groups = [group for group in groups if group]
        parts = [copy_batch(rng, self.tokenizer, _COPY_ROWS, rng.choice(COPY_LENGTHS[2:]))]
        for number, kinds in enumerate(groups):
            rows = stage.rows // len(groups) + (number < stage.rows % len(groups))
            parts.append(self._part(rng, replace(stage.style, kinds=kinds), rows, stage.questions))
        return parts

    def _part(self, rng: random.Random, style: Style, count: int, questions: int) -> Batch:
        people, firms = rng.randint(*style.people), rng.randint(*style.firms)
        style = replace(style, people=(people, people), firms=(firms, firms))
        names = list(FORMATS)
        form = FORMATS[rng.choices(names, [_FORMAT_WEIGHTS.get(name, 1.0) for name in names])[0]]
        rows: list[Row] = []
        while len(rows) < count:
            example = make_example(rng, style, "train", questions)
            if example.questions:
                # Nothing is drawn where nothing is shuffled: batches are then those of the seed alone.
                if self.options.shuffled and rng.random() < self.options.shuffled:
                    example = shuffle_example(rng, example)
                gap = rng.randrange(_MAX_GAP) if rng.random() < _GAP_SHARE else 0
                rows.append(encode_example(self.tokenizer, example, form, gap))
        return collate(rows)

    def train_step(self) -> float:
        """Take one step; return its loss."""
        factor = self._factor()
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        parts = [part.to(self.device) for part in self.batches(self.step)]
        count = sum(int((part.labels != IGNORED).sum()) for part in parts)
        total = 0.0
        for part in parts:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                logits, labels = answer_logits(self.model, part)
            loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return total

    def check(self) -> tuple[dict[str, float], dict[str, float]]:
        """Score the current stage on what is held out, and go to the next stage if its goal is reached.

        Returns
        -------
        tuple of (dict, dict)
            The scores in reading order; and those of the same questions over shuffled chunks, empty where none are trained.
        """
        stage = self.stages[self.stage]
        shuffled: dict[str, float] = {}
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            if stage.style is None:
                rng = random.Random(f"copy:{self.step}")
                batch = copy_batch(rng, self.tokenizer, 32, COPY_LENGTHS[self.copying]).to(self.device)
                with torch.no_grad():
                    logits, labels = answer_logits(self.model, batch)
                scores = {"all": float((logits.argmax(-1) == labels).float().mean())}
            else:
                examples = eval_examples(_CHECK_QUESTIONS, self.step, min_chunks=1, style=stage.style)
                scores = score(self.model, self.tokenizer, examples)
                if self.options.shuffled:
                    rng = random.Random(f"shuffle:{self.step}")
                    mixed = [shuffle_example(rng, example) for example in examples]
                    shuffled = score(self.model, self.tokenizer, mixed)
        passed = scores["all"] >= stage.goal
        if stage.style is None and passed and self.copying + 1 < len(COPY_LENGTHS):
            self.copying += 1
        elif (passed or self.step - self.stage_began >= stage.max_steps) and self.stage + 1 < len(self.stages):
            self.stage += 1
            self.stage_began = self.step
        return scores, shuffled

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash leaves the former one."""
        state = {
            "options": asdict(self.options),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "progress": {name: getattr(self, name) for name in ("step", "stage", "stage_began", "copying")},
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Go back to a checkpoint."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, value in state["progress"].items():
            setattr(self, name, value)

    def begin_from(self, weights: Path) -> None:
        """Begin with exported weights, at the last stage if no other is asked for; the optimizers begin anew."""
        self.model.load_state_dict(load_file(weights / "model.safetensors", device=str(self.device)))
        self.stage = len(self.stages) - 1 if self.options.stage is None else self.options.stage

    def _factor(self) -> float:
        factor = min(1.0, (self.step + 1) / self.options.warmup)
        if self.options.end_step is not None:
            factor *= min(1.0, max(0.0, (self.options.end_step - self.step) / self.options.decay))
        return factor


def run(
    trainer: Trainer, out: Path, save_every: int, export_to: Path | None = None, export_questions: int = 500
) -> None:
    """Train until the last step, writing ``log.jsonl`` and ``checkpoint.pt`` into `out`.

    Parameters
    ----------
    trainer
        The loop's state.
    out
        Folder of log and checkpoint.
    save_every
        Steps between checkpoints.
    export_to
        Folder that gets the weights after the last step.
    export_questions
        Questions that the exported scores are measured on.
    """
    began = time.perf_counter()
    losses: list[float] = []
    while trainer.options.end_step is None or trainer.step < trainer.options.end_step:
        losses.append(trainer.train_step())
        if trainer.step % _CHECK_EVERY == 0:
            seconds = time.perf_counter() - began
            stage = trainer.stages[trainer.stage]
            copy_length = COPY_LENGTHS[trainer.copying] if stage.style is None else None
            held_out, shuffled = trainer.check()
            record: dict[str, Any] = {
                "step": trainer.step,
                "stage": stage.name,
                "copy_length": copy_length,
                "loss": round(sum(losses) / len(losses), 4),
                "seconds": round(seconds, 1),
                "held_out": {kind: round(value, 3) for kind, value in held_out.items()},
            }
            if shuffled:
                record["held_out_shuffled"] = {kind: round(value, 3) for kind, value in shuffled.items()}
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
            began, losses = time.perf_counter(), []
        if trainer.step % save_every == 0:
            trainer.save(out / "checkpoint.pt")
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
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, help="torch threads")
    for name, value in asdict(Options()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            # The options without a default are whole numbers.
            parser.add_argument(flag, type=int if value is None else type(value), default=value)
    parsed = vars(parser.parse_args(arguments))
    out, resume, export_to = parsed.pop("out"), parsed.pop("resume"), parsed.pop("export")
    weights = parsed.pop("begin_from")
    export_questions, save_every, threads = (parsed.pop(name) for name in ("export_questions", "save_every", "threads"))
    if threads is not None:
        torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Options(**parsed))
    if weights is not None:
        trainer.begin_from(weights)
    if resume and (out / "checkpoint.pt").exists():
        trainer.load(out / "checkpoint.pt")
        _forget_after(out / "log.jsonl", trainer.step)
    run(trainer, out, save_every, export_to, export_questions)


def _forget_after(log: Path, step: int) -> None:
    """Remove what a run wrote after its last checkpoint, for it is about to be done again."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


if __name__ == "__main__":
    main()
