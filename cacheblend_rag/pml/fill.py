"""Prompts as templates: the same imports, with other texts and other documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from cacheblend_rag.pml.nodes import Module, Node, Role, Scaffold, Text, Union, inside
from cacheblend_rag.pml.prompt import Import, NewText, Prompt, Turn
from cacheblend_rag.pml.schema import Schema

__all__ = ["check_documents", "fill_texts", "plain_text", "prompt_texts", "put_documents"]


def prompt_texts(prompt: Prompt) -> Iterator[str]:
    """Yield what a prompt brings along: arguments and new text, in reading order."""

    def visit(nodes: Iterable[object]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, Import):
                yield from node.arguments.values()
                yield from visit(node.children)
            elif isinstance(node, NewText | Turn):
                yield node.text

    return visit(prompt.children)


def fill_texts(prompt: Prompt, fill: Callable[[str], str]) -> Prompt:
    """Return a prompt with `fill` applied to each of its arguments and new texts.

    What comes out is text and never markup, so nothing has to be escaped.

    Raises
    ------
    PMLError
        If the prompt does not fit its schema any more.
    """

    def visit(node: Import | NewText | Turn | str) -> Import | NewText | Turn:
        if isinstance(node, str):
            return NewText(fill(node))
        if isinstance(node, Import):
            arguments = {name: fill(text) for name, text in node.arguments.items()}
            children = [child for child in map(visit, node.children) if not isinstance(child, Turn)]
            return Import(node.name, arguments, children, node.place)
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
    schema = prompt.schema
    check_documents(prompt, module)
    names = [f"{module}-{number}" for number in range(1, len(texts) + 1)]
    place = schema.modules[module].place
    nodes: list[Node] = []
    for name, text in zip(names, texts, strict=True):
        nodes.append(Module(name, (Text(text, place),), place))
        if separator:
            nodes.append(Text(separator, place))

    def in_schema(children: Sequence[Node]) -> tuple[Node, ...]:
        made: list[Node] = []
        for node in children:
            if isinstance(node, Module) and node.name == module:
                made += nodes
            elif isinstance(node, Union):
                members = [replace(member, children=in_schema(member.children)) for member in node.members]
                made.append(replace(node, members=tuple(members)))
            elif isinstance(node, Module | Scaffold | Role):
                made.append(replace(node, children=in_schema(node.children)))
            else:
                made.append(node)
        return tuple(made)

    def in_prompt(children: Iterable[object]) -> Iterator[Import | NewText | Turn | str]:
        for node in children:
            if isinstance(node, Import) and node.name == module:
                yield from (Import(name) for name in names)
            elif isinstance(node, Import):
                kept = [each for each in in_prompt(node.children) if not isinstance(each, Turn)]
                yield replace(node, children=tuple(kept))
            elif isinstance(node, NewText | Turn | str):
                yield node

    with_documents = Schema(schema.name, in_schema(schema.children), schema.source)
    return Prompt(with_documents, tuple(in_prompt(prompt.children)), prompt.place)  # type: ignore[arg-type]


def plain_text(prompt: Prompt) -> str:
    """Return what a prompt says, for people and logs: without the words of a chat template, new text behind its import."""
    texts: list[tuple[str | None, str]] = []

    def in_schema(nodes: Iterable[Node], module: str | None) -> None:
        for node in nodes:
            if isinstance(node, Text):
                texts.append((module, node.text))
            elif isinstance(node, Module):
                if node.name in prompt.imports:
                    in_schema(node.children, node.name)
            elif isinstance(node, Scaffold | Role | Union):
                in_schema(inside(node), module)
            elif module is not None:
                texts.append((module, prompt.imports[module].arguments.get(node.name, "")))

    in_schema(prompt.schema.children, None)

    def in_prompt(nodes: Iterable[object], behind: int) -> int:
        for node in nodes:
            if isinstance(node, Import):
                own = [number for number, (module, _) in enumerate(texts) if module == node.name]
                behind = in_prompt(node.children, own[-1] + 1 if own else behind)
            elif isinstance(node, NewText | Turn):
                texts.insert(behind, (None, node.text))
                behind += 1
        return behind

    body = list(prompt.children)
    last = max((number for number, node in enumerate(body) if isinstance(node, Import)), default=-1)
    in_prompt(body[: last + 1], 0)
    in_prompt(body[last + 1 :], len(texts))
    return "".join(text for _, text in texts)
