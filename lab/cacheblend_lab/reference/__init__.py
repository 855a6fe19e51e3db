"""The model of the tests: a trained decoder of 3.4 million weights, and documents about the only world that it knows.

It needs no download, and answers in a moment; ``"reference"`` is its name wherever a model is named.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_lab.reference.corpus import demo_documents, demo_questions

__all__ = ["WEIGHTS_DIR", "demo_documents", "demo_questions", "load_model", "load_tokenizer"]

WEIGHTS_DIR = Path(__file__).parent / "weights"
"""The folder with weights and tokenizer."""


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Return its tokenizer."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(WEIGHTS_DIR, local_files_only=True)
    return tokenizer


def load_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Return it in evaluation mode, on the CPU; float32 is what it was measured in."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(WEIGHTS_DIR, dtype=dtype, local_files_only=True)
    model.eval()
    return model
