"""A schema's prompt on its way through a framework, which knows strings and messages only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cacheblend_rag.errors import PromptError
from cacheblend_rag.pml.fill import plain_text
from cacheblend_rag.pml.prompt import Prompt

__all__ = ["PROMPT_KEY", "PMLText", "prompt_in"]

PROMPT_KEY = "cacheblend_pml"
"""Under what a message's ``additional_kwargs`` have the prompt whose plain text it holds."""


class PMLText(str):
    """The plain text of a schema's prompt, which carries the prompt itself to a model that reads it.

    Frameworks hand models that are no chat models a string. This one is the prompt's words for whatever shows or caches it.
    """

    prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PMLText:
        """Return the text of a prompt."""
        text = cls(plain_text(prompt))
        text.prompt = prompt
        return text


class _Message(Protocol):
    """What the messages of both frameworks have."""

    additional_kwargs: dict[str, Any]


def prompt_in(given: str | Sequence[_Message]) -> Prompt | None:
    """Return the prompt of a schema that a text or messages carry, if they do.

    Raises
    ------
    PromptError
        If there are other messages beside it.
    """
    if isinstance(given, str):
        return given.prompt if isinstance(given, PMLText) else None
    found = [message.additional_kwargs[PROMPT_KEY] for message in given if PROMPT_KEY in message.additional_kwargs]
    if not found:
        return None
    if len(given) > 1 or not isinstance(found[0], Prompt):
        raise PromptError(
            "a schema's prompt is a whole conversation; put other messages, and a system prompt that the model was given, into "
            "the schema or the prompt, as <system>, <user> and <assistant>"
        )
    return found[0]
