"""Write the model as the package ships it: weights, tokenizer, scores, training log."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_rag.lab.training.corpus import eval_examples
from cacheblend_rag.lab.training.scoring import score
from cacheblend_rag.lab.training.tokenizer import save_tokenizer

__all__ = ["export", "measure"]


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_questions: int = 500, seed: int = 7
) -> dict[str, Any]:
    """Score a model on held-out questions over contexts of at least 12 chunks, with full prefill and with plain reuse."""
    examples = eval_examples(num_questions, seed)
    return {
        "num_questions": num_questions,
        "seed": seed,
        "min_chunks": 12,
        "metric": "share of answers whose whole sentence is exactly right under greedy decoding",
        "full": {kind: round(value, 4) for kind, value in score(model, tokenizer, examples).items()},
        "reuse": {kind: round(value, 4) for kind, value in score(model, tokenizer, examples, reuse=True).items()},
    }


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
