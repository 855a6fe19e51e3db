"""A question about passages, as a prompt for any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.reference.prompt import FORMATS

__all__ = ["passage_config", "question_prompt"]

# A character that no tokenizer treats specially and no template contains.
_CONTEXT = "\ue000"


def passage_config(config: BlendConfig | None = None) -> BlendConfig:
    """Return settings, by default the environment's, with what `question_prompt` puts between passages as the `separator`.

    Where they name a separator of their own, it stays.
    """
    config = BlendConfig.of(config)
    if "separator" in config.model_fields_set:
        return config
    return config.replace(separator=FORMATS["plain_answer"].separator)


def question_prompt(tokenizer: Any, question: str, chunks: Sequence[Chunk]) -> BlendPrompt:
    """Return the prompt that asks `question` of `chunks`.

    Parameters
    ----------
    tokenizer : Any
        The model's tokenizer; where it has a chat template, the prompt is the user's message of a chat.
    question : str
        The question.
    chunks : sequence of Chunk
        What the answer is to be found in.

    Returns
    -------
    BlendPrompt
        Instruction, chunks one a line, question.
    """
    form = FORMATS["plain_answer"]
    if getattr(tokenizer, "chat_template", None):
        message = f"{form.head}{_CONTEXT}{FORMATS['plain'].suffix(question)}"
        rendered: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        prefix, _, suffix = rendered.partition(_CONTEXT)
    else:
        prefix, suffix = form.head, form.suffix(question)
    return BlendPrompt(prefix, chunks, suffix, separator=form.separator)
