"""Engines that know the chunks of these chats."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_lab.settings import blend_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine import Conversation
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def make_engine(make_engine: MakeEngine, model: PreTrainedModel) -> MakeEngine:
    def make(model: PreTrainedModel = model, store: Any = None, **values: Any) -> BlendEngine:
        settings = {"strict": True, "self_check": False, "selector": "hkvd", "recompute_ratio": 0.15} | values
        engine = make_engine(store, model, **settings)
        engine.add(CHUNKS)
        return engine

    return make


CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 14, 17, 9))]
CONTEXT_END = words(9, 90)
# Tokens of the first turn: BOS, instructions, the two chunks, what ends the context, the question.
WHOLE_FIRST_TURN = 1 + 10 + 42 + 9 + 5
UP_TO_THE_FIRST_CHUNK = 1 + 10
UP_TO_THE_SECOND_CHUNK = 1 + 10 + 20


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def chat_prompt(chunks: Sequence[Chunk], history: Sequence[int], question: str) -> BlendPrompt:
    """A chat as LlamaIndex's context chat writes it: instructions, context, what was said, and the question."""
    return BlendPrompt(segments=[words(10, 80), *chunks, CONTEXT_END, tuple(history), ids_of(question)])


def own_answer(model: PreTrainedModel, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt_ids])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist())


def second_turn(engine: BlendEngine, conversation: Conversation, **config: Any) -> int:
    """How many tokens a turn takes over that says the same behind the same context, and more."""
    prompt = chat_prompt(CHUNKS[:2], ids_of(words(5, 1)), words(6, 2))
    settings = blend_settings(engine.blend, **config) if config else None
    return engine.prefill(prompt, blend=settings, conversation=conversation).report.conversation_tokens


def first_turn(engine: BlendEngine, conversation: Conversation, **config: Any) -> None:
    settings = blend_settings(engine.blend, **config) if config else None
    engine.prefill(chat_prompt(CHUNKS[:2], [], words(5, 1)), blend=settings, conversation=conversation)
