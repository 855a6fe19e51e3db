"""A prompt at the size of a model that people use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from cacheblend_rag.chunk import BlendPrompt, Chunk, FixedText
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.lab.bench.shapes import random_model, shape_config
from cacheblend_rag.reference.prompt import DEFAULT_FORMAT, FORMATS
from cacheblend_rag.tuning import Tuning

__all__ = ["RealSize", "at_real_size"]

_ROUNDS = 5


@dataclass(frozen=True)
class RealSize:
    """Times to the first token of one prompt.

    Attributes
    ----------
    shape : str
        Of which model the shape is; its weights are random.
    prompt_tokens : int
        Length of the prompt.
    full_s, blend_s : float
        By full prefill, measured once, and with the chunks' KV there, median of several.
    """

    shape: str
    prompt_tokens: int
    full_s: float
    blend_s: float


def at_real_size(tokenizer: Any, texts: Sequence[str], question: str, shape: str = "qwen2-0.5b") -> RealSize:
    """Time a prompt on a model of a well-known shape.

    Parameters
    ----------
    tokenizer : Any
        Of the reference model, so that it is the same prompt.
    texts : sequence of str
        The chunks.
    question : str
        The question.
    shape : str
        The shape, of `cacheblend_rag.lab.bench.shapes`.

    Returns
    -------
    RealSize
        The times.
    """
    form = FORMATS[DEFAULT_FORMAT]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(shape_config(shape), device=device, dtype=dtype)
    # The self-check takes seconds on a model of this size, and tests run it on this family.
    with BlendEngine(model, tokenizer, tuning=Tuning(self_check=False)) as engine:
        chunks = [Chunk(text) for text in texts]
        engine.add(chunks)
        prompt = BlendPrompt(FixedText(form.prefix()), chunks, form.suffix(question), form.separator)
        engine.prefill(prompt)
        blend_s = median(engine.prefill(prompt).report.ttft_s for _ in range(_ROUNDS))
        full = engine.prefill(prompt, blend=engine.blend.replace(enabled=False)).report
    return RealSize(shape, full.prompt_tokens, full.ttft_s, blend_s)
