"""Tiny random hybrids, and prompts of a document behind a head."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_hybrid import HybridEngine
from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_rag import BlendPrompt, Chunk, ChunkRef, FixedText
from tests.families import tiny_tokenizer, words

MakeHybrid = Callable[..., HybridEngine]

HEAD = FixedText(words(12, 3))
PIECES = [Chunk(words(30, n), id, document="d", start=400 * n) for n, id in enumerate("abc")]


def ask(*ids: str, question: str = words(9, 4), head: Any = HEAD) -> BlendPrompt:
    """Return a prompt of a head, chunks and a question."""
    return BlendPrompt(segments=[head, *map(ChunkRef, ids), question])


def hybrid(family: str) -> PreTrainedModel:
    """Return a tiny random model of a family."""
    return tiny_model(tiny_config(family, eos_token_id=None))


def own_logits(engine: HybridEngine, prompt: BlendPrompt) -> torch.Tensor:
    """Return the logits after a prompt that the model reads by itself, from its first token to its last."""
    with torch.no_grad():
        logits: torch.Tensor = engine.model(torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]
    return logits


def own_answer(engine: HybridEngine, prompt: BlendPrompt, count: int) -> list[int]:
    """Return what the model's own ``generate`` answers."""
    ids = torch.tensor([engine.prompt_ids(prompt)])
    with torch.no_grad():
        found = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    answer: list[int] = found[0, ids.shape[1] :].tolist()
    return answer


@pytest.fixture
def make_hybrid() -> Iterator[MakeHybrid]:
    """Make engines that know a document of three chunks, unless `filled` says otherwise."""
    with ExitStack() as made:

        def make(model: Any = "qwen3_next", tokenizer: Any = None, filled: bool = True, **options: Any) -> HybridEngine:
            loaded = hybrid(model) if isinstance(model, str) else model
            engine = made.enter_context(HybridEngine(loaded, tokenizer or tiny_tokenizer(), **options))
            if filled:
                engine.add(PIECES)
            return engine

        yield make
