"""Scores of a model on held-out questions, and the model written as the package ships it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_lab.reference.prompt import DEFAULT_FORMAT, FORMATS, PromptFormat
from cacheblend_lab.training.batch import BRANCHED, IGNORED, Batch, collate, encode_example
from cacheblend_lab.training.corpus import Example, eval_examples
from cacheblend_lab.training.paragraphs import ORDERS, Paragraphs
from cacheblend_lab.training.tokenizer import save_tokenizer

__all__ = ["answer_logits", "correct_answers", "export", "measure", "score"]


def answer_logits(model: LlamaForCausalLM, batch: Batch, reuse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits where something is to be predicted, and what is to be predicted there."""
    mask: torch.Tensor | None = None
    extra: dict[str, Any] = {}
    if reuse or model.config._attn_implementation != BRANCHED:
        mask = batch.mask(reuse)
    else:
        extra = {
            "context_length": batch.context_length,
            "question_length": batch.question_length,
            "context_lengths": batch.context_lengths(),
        }
    hidden = model.model(
        input_ids=batch.ids, position_ids=batch.positions, attention_mask=mask, use_cache=False, **extra
    ).last_hidden_state
    wanted = batch.labels != IGNORED
    return model.lm_head(hidden[wanted]), batch.labels[wanted]


@torch.no_grad()
def correct_answers(model: LlamaForCausalLM, batch: Batch, reuse: bool = False) -> dict[tuple[int, int], bool]:
    """Return for each (row, branch) whether greedy decoding writes exactly the wanted sentence.

    One pass over the gold answers tells: greedy decoding writes the gold sentence if and only if every gold token is the
    likeliest after the gold tokens before it.
    """
    logits, labels = answer_logits(model, batch, reuse)
    right = (logits.argmax(-1) == labels).tolist()
    rows, columns = torch.nonzero(batch.labels != IGNORED, as_tuple=True)
    branches = batch.branches[rows, columns].tolist()
    verdicts: dict[tuple[int, int], bool] = {}
    for row, branch, ok in zip(rows.tolist(), branches, right, strict=True):
        verdicts[row, branch] = verdicts.get((row, branch), True) and ok
    return verdicts


def score(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    reuse: bool = False,
    form: PromptFormat = FORMATS[DEFAULT_FORMAT],
    rows: int = 8,
) -> dict[str, float]:
    """Return the share of sentences that are exactly right, by question kind and over ``all``."""
    device = next(model.parameters()).device
    right: dict[str, list[bool]] = defaultdict(list)
    was_training = model.training
    model.eval()
    for start in range(0, len(examples), rows):
        part = examples[start : start + rows]
        batch = collate([encode_example(tokenizer, example, form) for example in part]).to(device)
        for (row, branch), ok in correct_answers(model, batch, reuse).items():
            right[part[row].questions[branch - 1].kind].append(ok)
            right["all"].append(ok)
    model.train(was_training)
    return {kind: sum(values) / len(values) for kind, values in sorted(right.items())}


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_questions: int = 500, seed: int = 7
) -> dict[str, Any]:
    """Score a model on held-out questions over paragraphs in each order, with full prefill and with plain reuse."""
    scores: dict[str, Any] = {
        "num_questions": num_questions,
        "seed": seed,
        "min_chunks": Paragraphs().total[0],
        "metric": "share of answers whose whole sentence is exactly right under greedy decoding",
    }
    for order in ORDERS:
        examples = eval_examples(num_questions, seed, 1, Paragraphs(), per_context=16, order=order)
        for name, reuse in (("full", False), ("reuse", True)):
            # Those in reading order are the model's scores.
            key = name if order == "reading" else f"{name}_{order}"
            found = score(model, tokenizer, examples, reuse, rows=2)
            scores[key] = {kind: round(value, 4) for kind, value in found.items()}
    return scores


def export(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    step: int,
    log: Path | None = None,
    num_questions: int = 200,
) -> dict[str, Any]:
    """Write everything into a folder, file by file under a temporary name; return the scores."""
    scores = {"step": step, **measure(model, tokenizer, num_questions)}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        temporary = Path(name)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            do_sample=False,
        )
        model.save_pretrained(temporary, safe_serialization=True)
        save_tokenizer(tokenizer, temporary)
        (temporary / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
        if log is not None and log.exists():
            shutil.copy(log, temporary / "training_log.jsonl")
        for path in temporary.iterdir():
            # safetensors writes files that only their owner may read.
            path.chmod(0o644)
            os.replace(path, folder / path.name)
    return scores
