"""Prompts as templates of frameworks: the same imports with other texts and other documents, and their way to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cacheblend_rag.errors import PromptError
from cacheblend_rag.pml.nodes import Import, Module, Node, Param, PromptNode, Text
from cacheblend_rag.pml.schema import Prompt, Schema

__all__ = [
    "PROMPT_KEY",
    "PMLText",
    "check_documents",
    "fill_texts",
    "plain_text",
    "prompt_in",
    "prompt_texts",
    "put_documents",
]

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


def prompt_in(given: str | Sequence[Any]) -> Prompt | None:
    """Return the prompt of a schema that a text or messages of either framework carry, if they do.

    Raises
    ------
    PromptError
        If there are other messages beside it.
    """
    if isinstance(given, str):
        return given.prompt if isinstance(given, PMLText) else None
    messages: Sequence[Any] = given
    found = [each.additional_kwargs[PROMPT_KEY] for each in messages if PROMPT_KEY in each.additional_kwargs]
    if not found:
        return None
    if len(messages) > 1 or not isinstance(found[0], Prompt):
        raise PromptError(
            "a schema's prompt is a whole conversation; put other messages, and a system prompt that the model was given, into "
            "the schema or the prompt, as <system>, <user> and <assistant>"
        )
    return found[0]


def prompt_texts(prompt: Prompt) -> list[str]:
    """Return what a prompt brings along: arguments and new text, in reading order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    fill_texts(prompt, note)
    return found


def fill_texts(prompt: Prompt, fill: Callable[[str], str]) -> Prompt:
    """Return a prompt with `fill` applied to each of its arguments and new texts.

    What comes out is text and never markup, so nothing has to be escaped.

    Raises
    ------
    PMLError
        If the prompt does not fit its schema any more.
    """

    def visit(node: PromptNode | str) -> PromptNode | str:
        if isinstance(node, str):
            return fill(node)
        if isinstance(node, Import):
            arguments = {name: fill(text) for name, text in node.arguments.items()}
            return replace(node, arguments=arguments, children=tuple(map(visit, node.children)))
        return replace(node, text=fill(node.text))

    return replace(prompt, children=tuple(map(visit, prompt.children)))


def check_documents(prompt: Prompt, module: str) -> None:
    """See that documents can be put into the place of a module of a prompt.

    Raises
    ------
    PMLError
        If the prompt does not import the module, or it is a member of a union.
    """
    if module not in prompt.imports:
        raise prompt.place.error(
            f"the documents belong in the place of module {module!r}, which the prompt does not import; it imports "
            f"{', '.join(prompt.imports) or 'none'}"
        )
    if any(module in union for union in prompt.schema.unions):
        raise prompt.place.error(
            f"module {module!r} is a member of a union, of which a prompt imports one at most; put the documents into the place "
            "of a module outside of unions"
        )


def put_documents(prompt: Prompt, module: str, texts: Sequence[str], separator: str = "\n\n") -> Prompt:
    """Put documents into the place of a module, each as a module of its own: ``name-1``, ``name-2`` and so on.

    Each is tokenised as it stands, so the KV of a stored chunk with the same text is reused.

    Parameters
    ----------
    prompt : Prompt
        Imports the module.
    module : str
        The module in whose place they are put; what stands in it is not used.
    texts : sequence of str
        The documents, in order. Without any, the module is left out.
    separator : str
        Text between two documents, and behind the last one.

    Returns
    -------
    Prompt
        A prompt for a schema of the same name, with these modules.

    Raises
    ------
    PMLError
        If the prompt does not import the module, or it is a member of a union.
    """
    check_documents(prompt, module)
    schema = prompt.schema
    place = schema.modules[module].place
    documents = [Module(f"{module}-{number}", (Text(text, place),), place) for number, text in enumerate(texts, 1)]

    def in_schema(nodes: Sequence[Node]) -> Iterator[Node]:
        for node in nodes:
            if isinstance(node, Text | Param):
                yield node
            elif not isinstance(node, Module) or node.name != module:
                yield replace(node, children=tuple(in_schema(node.children)))  # type: ignore[arg-type]
            else:
                for document in documents:
                    yield document
                    if separator:
                        yield Text(separator, place)

    def in_prompt(nodes: Sequence[PromptNode | str]) -> Iterator[PromptNode | str]:
        for node in nodes:
            if not isinstance(node, Import):
                yield node
            elif node.name != module:
                yield replace(node, children=tuple(in_prompt(node.children)))
            else:
                yield from (Import(document.name) for document in documents)

    with_documents = Schema(schema.name, tuple(in_schema(schema.children)), schema.source)
    return Prompt(with_documents, tuple(in_prompt(prompt.children)), prompt.place)


def plain_text(prompt: Prompt) -> str:
    """Return what a prompt says, for people and logs: without the words of a chat template, new text behind its import."""
    texts: list[tuple[str | None, str]] = []

    def in_schema(nodes: Sequence[Node], module: str | None) -> None:
        for node in nodes:
            if isinstance(node, Text):
                texts.append((module, node.text))
            elif isinstance(node, Param):
                texts.append((module, prompt.imports[module or ""].arguments[node.name]))
            elif not isinstance(node, Module):
                in_schema(node.children, module)
            elif node.name in prompt.imports:
                in_schema(node.children, node.name)

    def in_prompt(nodes: Sequence[PromptNode | str], behind: int) -> int:
        for node in nodes:
            if isinstance(node, Import):
                own = [number for number, (module, _) in enumerate(texts, 1) if module == node.name]
                behind = in_prompt(node.children, own[-1] if own else behind)
            else:
                texts.insert(behind, (None, node if isinstance(node, str) else node.text))
                behind += 1
        return behind

    in_schema(prompt.schema.children, None)
    in_prompt(prompt.children[: prompt.body_length], 0)
    in_prompt(prompt.children[prompt.body_length :], len(texts))
    return "".join(text for _, text in texts)
