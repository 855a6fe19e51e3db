"""The training loop's state: model, optimizers, and where in the curriculum they are."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_lab.reference.prompt import FORMATS, PromptFormat
from cacheblend_lab.training.batch import (
    BRANCHED,
    IGNORED,
    Batch,
    Row,
    collate,
    copy_batch,
    encode_example,
    verdict_batch,
)
from cacheblend_lab.training.corpus import eval_examples, make_example
from cacheblend_lab.training.curriculum import COPY_LENGTHS, MEDIUM, SHORT, STAGES, Stage
from cacheblend_lab.training.paragraphs import ORDERS, Paragraphs
from cacheblend_lab.training.questions import ContextStyle
from cacheblend_lab.training.scoring import answer_logits, score
from cacheblend_lab.training.tokenizer import MAX_LENGTH, build_tokenizer
from cacheblend_lab.training.world import Style
from cacheblend_rag.errors import ConfigError

__all__ = ["Options", "Trainer", "build_model"]

# Long system prompts cost much and teach little: that format is rare.
_FORMAT_WEIGHTS = {"chat": 6.0, "llama_index_system": 0.5}
_KIND_GROUPS = (("single", "pronoun", "unanswerable"), ("two_hop",), ("comparison",))
_COPY_ROWS = 4
_VERDICTS = 4
_GAP_SHARE = 0.3
_SHORT_QUESTIONS = 16
_MEDIUM_QUESTIONS = 24
_CHECK_QUESTIONS = 160
_CHECK_PER_CONTEXT = 16
_MAX_GAP = 400
# Most tokens, padding included, of the contexts that are computed at once: paragraphs differ much in length.
_PART_TOKENS = 3072


@dataclass(frozen=True)
class Options:
    """Settings of a run; the command line's arguments.

    Attributes
    ----------
    layers, hidden, heads, intermediate
        The model's sizes.
    lr, muon_lr
        Learning rates of AdamW (embeddings, norms, head) and of Muon (all other matrices).
    warmup
        Steps of linear warm-up.
    decay
        Steps before the end over which the learning rates fall linearly to zero.
    end_step
        The last step; by default the last of the curriculum's.
    seed
        Batches and initial weights follow from it.
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
    decay: int = 400
    end_step: int | None = None
    seed: int = 1
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
    """The training loop and its state."""

    def __init__(self, options: Options, stages: Sequence[Stage] = STAGES, device: torch.device | None = None) -> None:
        self.options = options
        self.stages = tuple(stages)
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

    @property
    def end_step(self) -> int | None:
        """The last step, or None as long as it is not known: before the last stage has begun."""
        if self.options.end_step is not None or self.stage + 1 < len(self.stages):
            return self.options.end_step
        return self.stage_began + self.stages[-1].max_steps

    def batches(self, step: int) -> list[Batch]:
        """Return the parts of a step's batch; they follow from seed, step, stage and copying length.

        Where contexts are short, questions of one part have about equally long answers, so that little is padding. Every part is
        in every step: were the kinds taken in turn, the model would sway between the sentences that it was asked for last.
        """
        rng = random.Random(f"{self.options.seed}:{step}")
        stage = self.stages[self.stage]
        if stage.style is None:
            return [copy_batch(rng, self.tokenizer, stage.rows, COPY_LENGTHS[self.copying])]
        parts = [copy_batch(rng, self.tokenizer, _COPY_ROWS, rng.choice(COPY_LENGTHS[2:]))]
        if stage.verdicts:
            parts.append(verdict_batch(rng, self.tokenizer, stage.verdicts, _VERDICTS))
        if isinstance(stage.style, Paragraphs):
            # Such contexts are dear: each is asked about in every way.
            long = [self._row(rng, stage.style, stage.style.orders, stage.questions) for _ in range(stage.rows)]
            short = [self._row(rng, SHORT, ORDERS, _SHORT_QUESTIONS) for _ in range(stage.short_rows)]
            medium = [self._row(rng, MEDIUM, ORDERS, _MEDIUM_QUESTIONS) for _ in range(stage.medium_rows)]
            return parts + _packed(long) + _packed(short) + _packed(medium)
        groups = [tuple(kind for kind in group if kind in stage.style.kinds) for group in _KIND_GROUPS]
        groups = [group for group in groups if group]
        for number, kinds in enumerate(groups):
            rows = stage.rows // len(groups) + (number < stage.rows % len(groups))
            parts.append(self._part(rng, replace(stage.style, kinds=kinds), rows, stage.questions))
        return parts

    def _part(self, rng: random.Random, style: Style, count: int, questions: int) -> Batch:
        people, firms = rng.randint(*style.people), rng.randint(*style.firms)
        style = replace(style, people=(people, people), firms=(firms, firms))
        form = _form(rng)
        return collate([self._row(rng, style, ORDERS[:1], questions, form) for _ in range(count)])

    def _row(
        self,
        rng: random.Random,
        style: ContextStyle,
        orders: Sequence[str],
        questions: int,
        form: PromptFormat | None = None,
    ) -> Row:
        while True:
            example = make_example(rng, style, "train", questions, rng.choice(orders))
            if example.questions:
                gap = rng.randrange(_MAX_GAP) if rng.random() < _GAP_SHARE else 0
                return encode_example(self.tokenizer, example, form or _form(rng), gap)

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
            with self._autocast():
                logits, labels = answer_logits(self.model, part)
            loss = cross_entropy(logits.float(), labels, reduction="sum") / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return total

    def check(self) -> dict[str, dict[str, float]]:
        """Score the current stage on what is held out, and go to the next stage if its goal is reached.

        Returned are the scores by kind, for each order that the stage has (of :data:`ORDERS`), whose mean is to reach the goal;
        and those of ``short`` contexts in reading order, where a stage of paragraphs has such.
        """
        stage = self.stages[self.stage]
        if stage.style is None:
            rng = random.Random(f"copy:{self.step}")
            batch = copy_batch(rng, self.tokenizer, 32, COPY_LENGTHS[self.copying]).to(self.device)
            with torch.no_grad(), self._autocast():
                logits, labels = answer_logits(self.model, batch)
            scores = {"reading": {"all": float((logits.argmax(-1) == labels).float().mean())}}
        else:
            most = min(stage.questions, _CHECK_PER_CONTEXT)
            scores = {order: self._score(stage.style, most, order) for order in _orders(stage.style)}
        passed = sum(found["all"] for found in scores.values()) / len(scores) >= stage.goal
        if stage.short_rows:
            scores["short"] = self._score(SHORT, _SHORT_QUESTIONS)
        if stage.style is None and passed and self.copying + 1 < len(COPY_LENGTHS):
            self.copying += 1
        elif (passed or self.step - self.stage_began >= stage.max_steps) and self.stage + 1 < len(self.stages):
            self.stage += 1
            self.stage_began = self.step
        return scores

    def _score(self, style: ContextStyle, per_context: int, order: str = "reading") -> dict[str, float]:
        examples = eval_examples(_CHECK_QUESTIONS, self.step, 1, style, per_context, order)
        with self._autocast():
            return score(self.model, self.tokenizer, examples, rows=4)

    def _autocast(self) -> torch.autocast:
        # A CPU without units for bfloat16 computes in it one number at a time.
        has_units = self.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=has_units)

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
        state = load_file(weights / "model.safetensors", device=str(self.device))
        known, ours = state["lm_head.weight"].shape[0], len(self.tokenizer)
        if known != ours:
            raise ConfigError(
                f"{weights} is of a tokenizer of {known} tokens, but the corpus gives one of {ours}; begin from weights that "
                f"were trained on this corpus"
            )
        self.model.load_state_dict(state)
        self.stage = len(self.stages) - 1 if self.options.stage is None else self.options.stage

    def _factor(self) -> float:
        factor = min(1.0, (self.step + 1) / self.options.warmup)
        end = self.end_step
        if end is not None:
            factor *= min(1.0, max(0.0, (end - self.step) / self.options.decay))
        return factor


def _form(rng: random.Random) -> PromptFormat:
    names = list(FORMATS)
    return FORMATS[rng.choices(names, [_FORMAT_WEIGHTS.get(name, 1.0) for name in names])[0]]


def _orders(style: ContextStyle) -> tuple[str, ...]:
    return style.orders if isinstance(style, Paragraphs) else ("reading",)


def _packed(rows: list[Row]) -> list[Batch]:
    """Lay rows out in parts, those of about the same length together."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids), reverse=True):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0].ids) <= _PART_TOKENS:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [collate(part) for part in parts]
