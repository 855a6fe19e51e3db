"""A prompt for a schema: what it imports, the arguments, and new text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import ROLES, Place, RoleName, SchemaTree

__all__ = ["Import", "NewText", "Prompt", "PromptNode", "Turn"]


@dataclass(frozen=True, slots=True)
class NewText:
    """Text that the schema does not have; it is computed."""

    text: str
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat that the schema does not have; it is computed.

    Parameters
    ----------
    role : str
        "system", "user" or "assistant".
    text : str
        What is said.
    """

    role: RoleName
    text: str
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True)
class Import:
    """A module that a prompt takes from its schema.

    Parameters
    ----------
    name : str
        The module's name.
    arguments : mapping of str to str
        A text for each of its parameters; an empty one leaves the parameter out.
    children : sequence of (Import, NewText or str)
        The modules to take of those nested in it, and new text among them.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    children: Sequence[Import | NewText | str] = ()
    place: Place = field(default=Place(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", dict(self.arguments))
        object.__setattr__(self, "children", tuple(_as_node(child) for child in self.children))

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.arguments.items())), self.children))


PromptNode: TypeAlias = "Import | NewText | Turn"


@dataclass(frozen=True)
class Prompt:
    """A prompt that has been checked against its schema, but not against a model.

    Attributes
    ----------
    schema : SchemaTree
        The schema.
    children : tuple of PromptNode
        Imports and new text, in order; messages stand last.
    source : str or None
        Where its text came from.

    Raises
    ------
    PMLError
        If it imports a module that the schema does not have, or has elsewhere, or twice; two members of a union; if an argument
        is missing, or for no parameter; if an import stands behind a message.
    """

    schema: SchemaTree
    children: tuple[PromptNode, ...]
    place: Place = field(default=Place(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(_as_node(child) for child in self.children))
        _check(self)

    @cached_property
    def imports(self) -> dict[str, Import]:
        """What it imports, by name, nested imports included."""
        return {each.name: each for each in imports_in(self.children)}


def imports_in(children: Iterable[object]) -> Iterator[Import]:
    """Every import among the children of a prompt, at any depth, in reading order."""
    for node in children:
        if isinstance(node, Import):
            yield node
            yield from imports_in(node.children)


def _as_node(child: object) -> PromptNode:
    if isinstance(child, str):
        return NewText(child)
    if isinstance(child, Import | NewText | Turn):
        return child
    raise PMLError(f"a prompt holds {child!r:.40}, a {type(child).__name__}; give Import, Turn or text")


def _check(prompt: Prompt) -> None:
    taken: dict[str, Import] = {}
    _check_level(prompt.schema, prompt.children, None, taken)
    for members in prompt.schema.unions:
        # In the order of the prompt, so that the one is named that should not have been added.
        both = [one for name, one in taken.items() if name in members]
        if len(both) > 1:
            raise both[1].place.error(
                f"module {both[1].name!r} and module {both[0].name!r} are members of one union, of which a prompt imports one at "
                f"most; leave one of them out. The members are {', '.join(members[:8])}{', ...' if len(members) > 8 else ''}"
            )
    turn: Turn | None = None
    for node in prompt.children:
        if isinstance(node, Turn):
            if node.role not in ROLES:
                raise node.place.error(f"{node.role!r} is no role; take one of {', '.join(ROLES)}")
            turn = node
        elif turn is not None:
            what = f"<{node.name}>" if isinstance(node, Import) else "text"
            raise node.place.error(
                f"{what} stands behind the <{turn.role}> at {turn.place}; a prompt's own messages come last, behind all imports "
                "and text"
            )


def _check_level(schema: SchemaTree, children: Sequence[object], parent: str | None, taken: dict[str, Import]) -> None:
    for node in children:
        if isinstance(node, Turn) and parent is not None:
            raise node.place.error(f"<{node.role}> stands in the import of {parent!r}; put it behind all imports")
        if not isinstance(node, Import):
            continue
        _check_name(schema, node, parent)
        if node.name in taken:
            raise node.place.error(
                f"module {node.name!r} was imported at {taken[node.name].place}; a prompt imports a module once"
            )
        taken[node.name] = node
        _check_arguments(schema, node)
        _check_level(schema, node.children, node.name, taken)


def _check_name(schema: SchemaTree, node: Import, parent: str | None) -> None:
    if node.name not in schema.modules:
        near = difflib.get_close_matches(node.name, schema.modules, n=1)
        names = ", ".join(list(schema.modules)[:8]) + (", ..." if len(schema.modules) > 8 else "")
        hint = f"did you mean {near[0]!r}?" if near else f"it has {names}" if names else "it has no modules"
        raise node.place.error(f"schema {schema.name!r} has no module {node.name!r:.60}; {hint}")
    owner = schema.parents[node.name]
    if owner == parent:
        return
    if owner is None:
        raise node.place.error(f"module {node.name!r} is not nested in {parent!r}; import it outside of it")
    path = [node.name]
    while (above := schema.parents[path[-1]]) is not None:
        path.append(above)
    shown = "".join(f"<{name}>" for name in reversed(path[1:])) + f"<{node.name}/>"
    raise node.place.error(f"module {node.name!r} is nested in module {owner!r}; import it inside of that: {shown}...")


def _check_arguments(schema: SchemaTree, node: Import) -> None:
    params = {param.name: param for param in schema.modules[node.name].params}
    for name, value in node.arguments.items():
        if name not in params:
            known = f"it has {', '.join(params)}" if params else "it has none"
            raise node.place.error(f"module {node.name!r} has no parameter {name!r:.60}; {known}")
        if not isinstance(value, str):
            raise node.place.error(
                f"the argument for {name!r} of module {node.name!r} is the {type(value).__name__} {value!r:.40}; give a text"
            )
    for name, param in params.items():
        if name not in node.arguments:
            raise node.place.error(
                f"module {node.name!r} has the parameter {name!r}, for which the import has no argument; write "
                f'{name}="..." with at most {param.length} tokens, or {name}="" to leave it out'
            )
