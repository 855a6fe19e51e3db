"""What several of the LangChain tests do with a model."""

from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from langchain_cacheblend import BlendLLM, ChatBlend

__all__ = ["EXACT", "Kind", "KINDS", "Reports", "chunk_ids", "own_answer", "text_of"]

Kind = type[BlendLLM] | type[ChatBlend]
KINDS = pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])

EXACT = BlendConfig(recompute_ratio=1.0)


class Reports(BaseCallbackHandler):
    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    @property
    def hits(self) -> list[int]:
        return [report["hits"] for report in self.reports]

    def on_llm_end(self, response: LLMResult, **kwargs: object) -> None:
        for (generation,) in response.generations:
            message = getattr(generation, "message", None)
            info = message.response_metadata if message is not None else generation.generation_info
            self.reports.append(info["blend"])


def chunk_ids(prompt: BlendPrompt) -> list[str | None]:
    return [segment.id for segment in prompt.segments if isinstance(segment, Chunk)]


def own_answer(engine: BlendEngine, prompt: BlendPrompt, tokens: int) -> str:
    """What the model itself, without any of ours, makes of the ids of a prompt."""
    ids = torch.tensor([engine.prompt_ids(prompt)])
    output = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(engine.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text
