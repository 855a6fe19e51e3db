"""What of a prompt is its template's own words, whoever asks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from itertools import takewhile

from llama_index.core.base.llms.types import MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate

from llama_index_cacheblend.llm import BlendLLM

__all__ = ["is_fixed"]


def is_fixed(
    llm: BlendLLM, template: BasePromptTemplate, variables: Iterable[str], context: str, structured: bool, head: str
) -> bool:
    """Return whether all that a prompt begins with, up to its context, is written by its template and nobody else.

    It is where the template, filled with marks instead of values, begins with just that. What stands before the context in a
    template that works otherwise than by variables, or has messages of a conversation there, may be anybody's words.

    Parameters
    ----------
    llm : BlendLLM
        The model.
    template : BasePromptTemplate
        The template.
    variables : iterable of str
        The names of the variables that it was filled with.
    context : str
        The variable of the context.
    structured : bool
        Whether it asks for an object.
    head : str
        What the prompt begins with.
    """
    chosen = template.select(llm) if isinstance(template, SelectorPromptTemplate) else template
    if type(chosen) not in (PromptTemplate, ChatPromptTemplate) or chosen.function_mappings:
        return False
    # What was filled in beforehand is a value too.
    names = {*variables, *template.kwargs, *chosen.kwargs, context}
    marks = {name: f"CACHEBLEND-{uuid.uuid4().hex}" for name in names}
    mark = marks[context]
    try:
        text, _ = llm.render(template, structured, **marks)
    except Exception:  # a template may want numbers, and raise what it likes
        return False
    if not text.startswith(head + mark):
        return False
    if not isinstance(chosen, ChatPromptTemplate):
        return True
    before = takewhile(lambda message: mark not in (message.content or ""), chosen.format_messages(llm=llm, **marks))
    return all(message.role == MessageRole.SYSTEM for message in before)
