"""From chat messages to the prompt text that a tokenizer's chat template makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    VideoBlock,
)

from cacheblend_rag.errors import PromptError

__all__ = ["has_chat_template", "render_messages"]

_UNREADABLE = (AudioBlock, DocumentBlock, ImageBlock, VideoBlock)


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer says how chat messages are written."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_messages(tokenizer: Any, messages: Sequence[ChatMessage]) -> str:
    """Write chat messages as one prompt, up to where the assistant's answer begins.

    Some templates know no system message, or only one. Those get the system messages as one, or at the head of the first user
    message.

    Parameters
    ----------
    tokenizer : Any
        A tokenizer with a chat template.
    messages : sequence of ChatMessage
        The messages.

    Returns
    -------
    str
        The prompt, with the BOS if the template writes one.

    Raises
    ------
    PromptError
        If a message holds something other than text, or the template refuses the messages.
    """
    plain = [_plain(message) for message in messages]
    refusal: TemplateError | None = None
    for attempt in (plain, _one_system_message(plain), _without_system_message(plain)):
        try:
            text: str = tokenizer.apply_chat_template(attempt, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            refusal = refusal or error
        else:
            return text
    roles = [message["role"] for message in plain]
    raise PromptError(
        f"the model's chat template refuses messages with the roles {roles}: {refusal}; change their order, or give BlendLLM a "
        "messages_to_prompt of your own"
    ) from refusal


def _plain(message: ChatMessage) -> dict[str, str]:
    for block in message.blocks:
        if isinstance(block, _UNREADABLE):
            raise PromptError(
                f"a {message.role.value} message holds a {type(block).__name__}, and BlendLLM reads text only; leave it out"
            )
    return {"role": message.role.value, "content": message.content or ""}


def _one_system_message(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    system = "\n\n".join(message["content"] for message in messages if message["role"] == MessageRole.SYSTEM.value)
    others = [message for message in messages if message["role"] != MessageRole.SYSTEM.value]
    return [{"role": MessageRole.SYSTEM.value, "content": system}, *others] if system else others


def _without_system_message(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    first, *others = _one_system_message(messages) or [{"role": MessageRole.USER.value, "content": ""}]
    if first["role"] != MessageRole.SYSTEM.value:
        return [first, *others]
    if others and others[0]["role"] == MessageRole.USER.value:
        return [
            {"role": MessageRole.USER.value, "content": f"{first['content']}\n\n{others[0]['content']}"},
            *others[1:],
        ]
    return [{"role": MessageRole.USER.value, "content": first["content"]}, *others]
