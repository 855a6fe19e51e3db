"""What several of the LangChain tests do with a model."""

import copy
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from transformers import AddedToken

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from langchain_cacheblend import BlendLLM, ChatBlend

__all__ = ["EXACT", "Kind", "KINDS", "Reports", "TOOL_TEMPLATE", "chunk_ids", "knows_tags", "own_answer", "text_of"]

Kind = type[BlendLLM] | type[ChatBlend]
KINDS = pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])

EXACT = BlendConfig(recompute_ratio=1.0, selector="full")

# The form of Qwen and Hermes, with the roles that the reference model knows.
TOOL_TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write each call as JSON with a name and arguments between <tool_call></tool_call> tags.
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|user|>
<tool_response>
{{ message.content }}
</tool_response>
{% else %}<|{{ message.role }}|>
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


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


def knows_tags(tokenizer: Any) -> Any:
    """A copy of a tokenizer with the template of Qwen, for whose tags it has tokens that are not special."""
    known = copy.deepcopy(tokenizer)
    known.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    known.chat_template = TOOL_TEMPLATE
    return known


def own_answer(engine: BlendEngine, prompt: BlendPrompt, tokens: int) -> str:
    """What the model itself, without any of ours, makes of the ids of a prompt."""
    ids = torch.tensor([engine.prompt_ids(prompt)])
    output = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(engine.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def text_of(answer: Any) -> str:
    return answer if isinstance(answer, str) else answer.text
