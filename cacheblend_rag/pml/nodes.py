"""The tree of a schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from cacheblend_rag.errors import PMLError

__all__ = [
    "MAX_DEPTH",
    "MAX_PARAM_LENGTH",
    "Module",
    "Node",
    "Param",
    "Place",
    "Role",
    "RoleName",
    "ROLES",
    "Scaffold",
    "SchemaTree",
    "Text",
    "Union",
]

RoleName = Literal["system", "user", "assistant"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)

MAX_DEPTH = 64
"""How deep elements may be nested."""

MAX_PARAM_LENGTH = 100_000
"""How many tokens a parameter may reserve."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text, counted from 1, for messages.

    Attributes
    ----------
    source : str or None
        The file, or another name of the text.
    line, column : int or None
        The place in it; None for what was made in Python.
    """

    source: str | None = None
    line: int | None = None
    column: int | None = None

    def error(self, reason: str) -> PMLError:
        """Return an error that says this place."""
        return PMLError(reason, source=self.source, line=self.line, column=self.column)

    def __str__(self) -> str:
        return "in Python" if self.line is None else f"line {self.line}"


@dataclass(frozen=True, slots=True)
class Text:
    """Text as the model reads it."""

    text: str
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a module: a named slot for an argument of at most `length` tokens."""

    name: str
    length: int
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """A named piece of a prompt, whose KV is computed once; its children are texts, parameters, modules, unions, scaffolds."""

    name: str
    children: tuple[Node, ...]
    place: Place = field(default=Place(), compare=False)

    @property
    def params(self) -> tuple[Param, ...]:
        """The module's own parameters, those in scaffolds inside it included, those of nested modules not."""
        return tuple(_params(self.children))


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports one at most; they share a start position and the size of the largest."""

    members: tuple[Module, ...]
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Modules and texts that are encoded together, so that they attend to each other."""

    children: tuple[Node, ...]
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Role:
    """A message of a chat, at the schema's top or in a scaffold there; the model's chat template puts its words around it."""

    role: RoleName
    children: tuple[Node, ...]
    place: Place = field(default=Place(), compare=False)


Node: TypeAlias = "Text | Param | Module | Union | Scaffold | Role"


@dataclass(frozen=True)
class SchemaTree:
    """A validated schema.

    Attributes
    ----------
    name : str
        Its name, by which prompts say which schema they are for.
    children : tuple of Node
        What it consists of.
    source : str or None
        Where its text came from.
    """

    name: str
    children: tuple[Node, ...]
    source: str | None = field(default=None, compare=False)

    @cached_property
    def modules(self) -> dict[str, Module]:
        """All modules by their names, in reading order, nested ones included."""
        return {node.name: node for node in _walk(self.children) if isinstance(node, Module)}

    @cached_property
    def parents(self) -> dict[str, str | None]:
        """The name of the module that each module is nested in, None for those at the top."""
        found: dict[str, str | None] = {}

        def visit(children: tuple[Node, ...], parent: str | None) -> None:
            for node in children:
                if isinstance(node, Module):
                    found[node.name] = parent
                    visit(node.children, node.name)
                else:
                    visit(inside(node), parent)

        visit(self.children, None)
        return found

    @cached_property
    def unions(self) -> tuple[tuple[str, ...], ...]:
        """The names of each union's members, in reading order."""
        return tuple(
            tuple(member.name for member in node.members) for node in _walk(self.children) if isinstance(node, Union)
        )

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The messages in reading order."""
        return tuple(node for node in _walk(self.children) if isinstance(node, Role))


def inside(node: Node) -> tuple[Node, ...]:
    """Return what stands in a node."""
    if isinstance(node, Module | Scaffold | Role):
        return node.children
    return node.members if isinstance(node, Union) else ()


def _walk(children: tuple[Node, ...]) -> Iterator[Node]:
    for node in children:
        yield node
        yield from _walk(inside(node))


def _params(children: tuple[Node, ...]) -> Iterator[Param]:
    for node in children:
        if isinstance(node, Param):
            yield node
        elif isinstance(node, Scaffold):
            yield from _params(node.children)
