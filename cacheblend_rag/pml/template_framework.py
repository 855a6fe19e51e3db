"""Prompt templates of LangChain and LlamaIndex, known by what they have: neither framework is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import RoleName
from cacheblend_rag.pml.plan import Item, MessageItem
from cacheblend_rag.pml.template_text import read_braces, read_jinja, read_single_braces

__all__ = ["read_framework_template"]

_ROLES: dict[str, RoleName] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "chatbot": "assistant",
    "HumanMessagePromptTemplate": "user",
    "AIMessagePromptTemplate": "assistant",
    "SystemMessagePromptTemplate": "system",
}
_FORMATS = {"f-string": read_braces, "jinja2": read_jinja}


def read_framework_template(template: Any) -> tuple[Item, ...]:
    """Read a prompt template of LangChain or LlamaIndex; values that it has been given already are text.

    Raises
    ------
    PMLError
        If it is none, or holds something other than text and variables.
    """
    template = getattr(template, "default_template", template)
    if isinstance(getattr(template, "messages", None), list):
        given = _texts(getattr(template, "partial_variables", {}))
        return tuple(_langchain_message(message, given) for message in template.messages)
    if isinstance(getattr(template, "message_templates", None), list):
        given = _texts(getattr(template, "kwargs", {}))
        return tuple(_llama_index_message(message, given) for message in template.message_templates)
    text = getattr(template, "template", None)
    if isinstance(text, str) and hasattr(template, "template_format"):
        return _langchain_text(template, _texts(getattr(template, "partial_variables", {})))
    if isinstance(text, str) and hasattr(template, "template_vars"):
        return read_single_braces(text, _texts(getattr(template, "kwargs", {})))
    if isinstance(getattr(template, "template_str", None), str):
        return read_jinja(template.template_str, _texts(getattr(template, "kwargs", {})))
    raise PMLError(
        f"this {type(template).__name__} is no template; give a function, a string with format=, or a prompt template of "
        "LangChain or LlamaIndex"
    )


def _langchain_text(template: Any, given: Mapping[str, str]) -> tuple[Item, ...]:
    reader = _FORMATS.get(template.template_format)
    if reader is None:
        raise PMLError(f"templates in {template.template_format!r:.40} are not read; take one of {', '.join(_FORMATS)}")
    return reader(template.template, given)


def _langchain_message(message: Any, given: Mapping[str, str]) -> MessageItem:
    prompt = getattr(message, "prompt", None)
    if prompt is None:
        content = getattr(message, "content", None)
        if not isinstance(content, str):
            raise PMLError(
                f"a {type(message).__name__} has no text that is known before; leave it out, and give messages with the prompt"
            )
        return MessageItem(_role(str(getattr(message, "type", ""))), (content,))
    if not hasattr(prompt, "template_format") or not isinstance(getattr(prompt, "template", None), str):
        raise PMLError(f"a {type(message).__name__} holds something other than text; leave it out")
    role = getattr(message, "role", None) or type(message).__name__
    inner = {**given, **_texts(getattr(prompt, "partial_variables", {}))}
    return MessageItem(_role(str(role)), _langchain_text(prompt, inner))


def _llama_index_message(message: Any, given: Mapping[str, str]) -> MessageItem:
    role = getattr(message.role, "value", message.role)
    content = message.content
    if not isinstance(content, str):
        raise PMLError(f"a message of the {role} holds something other than text; leave it out")
    return MessageItem(_role(str(role)), read_single_braces(content, given))


def _role(name: str) -> RoleName:
    if name not in _ROLES:
        raise PMLError(f"a message has the role {name!r:.60}; take system, user or assistant")
    return _ROLES[name]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    for name, value in values.items():
        if callable(value):
            raise PMLError(f"the template computes {name!r:.60} by a function; give it a text, or leave it a variable")
    return {name: str(value) for name, value in values.items()}
