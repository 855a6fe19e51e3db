"""The nodes that schemas and prompts consist of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from cacheblend_rag.errors import PMLError

__all__ = [
    "MAX_DEPTH",
    "ROLES",
    "Import",
    "Module",
    "Node",
    "Param",
    "Place",
    "PromptNode",
    "Role",
    "RoleName",
    "Scaffold",
    "Text",
    "Turn",
    "Union",
    "nodes_of",
    "walk",
]

RoleName = Literal["system", "user", "assistant"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)

MAX_DEPTH = 64
"""The deepest that elements may be nested."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a text, counted from 1, for messages; without one for what was made in Python."""

    source: str | None = None
    line: int | None = None

    def error(self, reason: str) -> PMLError:
        """Return an error that says this place."""
        return PMLError(reason, source=self.source, line=self.line)

    def __str__(self) -> str:
        return "in Python" if self.line is None else f"line {self.line}"


@dataclass(frozen=True, slots=True)
class Text:
    """Text as the model reads it; in a prompt, text that the schema does not have. A string in its place means the same."""

    text: str
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Param:
    """A place in a module for an argument.

    Parameters
    ----------
    name : str
        Its name, a different one for each parameter of a module.
    length : int
        The most tokens that an argument may have.
    """

    name: str
    length: int
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, init=False)
class Module:
    """A named piece of a prompt, whose KV is computed once.

    Parameters
    ----------
    name : str
        Its name, which no other module of the schema has.
    children : str, or sequence of (str, Param, Module, Union or Scaffold)
        What it consists of.
    """

    name: str
    children: tuple[Node, ...]
    place: Place = field(compare=False)

    def __init__(self, name: str, children: Children, place: Place = Place()) -> None:
        _set(self, name=name, children=nodes_of(children, Text, Param, Module, Union, Scaffold), place=place)

    @property
    def params(self) -> tuple[Param, ...]:
        """The module's own parameters, those in scaffolds inside it included, those of nested modules not."""
        return tuple(
            node
            for node, above in walk(self.children)
            if isinstance(node, Param) and all(isinstance(each, Scaffold) for each in above)
        )


@dataclass(frozen=True, init=False)
class Union:
    """Modules of which a prompt imports one at most; they share a start position and the size of the largest.

    Parameters
    ----------
    children : sequence of Module
        Its members.
    """

    children: tuple[Module, ...]
    place: Place = field(compare=False)

    def __init__(self, children: Sequence[Module], place: Place = Place()) -> None:
        _set(self, children=nodes_of(children, Module), place=place)


@dataclass(frozen=True, init=False)
class Scaffold:
    """Modules and texts that are encoded together, so that they attend to each other.

    Parameters
    ----------
    children : sequence of nodes
        What a module, a message or the schema may hold where it stands, but no other scaffold.
    """

    children: tuple[Node, ...]
    place: Place = field(compare=False)

    def __init__(self, children: Children, place: Place = Place()) -> None:
        _set(self, children=nodes_of(children, Text, Param, Module, Union, Scaffold, Role), place=place)


@dataclass(frozen=True, init=False)
class Role:
    """A message of a chat, at the schema's top or in a scaffold there; the model's chat template puts its words around it.

    Parameters
    ----------
    role : str
        "system", "user" or "assistant".
    children : str, or sequence of (str, Module, Union or Scaffold)
        What is said.
    """

    role: RoleName
    children: tuple[Node, ...]
    place: Place = field(compare=False)

    def __init__(self, role: RoleName, children: Children, place: Place = Place()) -> None:
        _set(self, role=role, children=nodes_of(children, Text, Module, Union, Scaffold), place=place)


Node: TypeAlias = Text | Param | Module | Union | Scaffold | Role
Children: TypeAlias = "str | Sequence[Node | str]"


def walk(nodes: Sequence[Node], above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Yield every node in reading order with those that it stands in, outermost first."""
    for node in nodes:
        yield node, above
        if isinstance(node, Module | Union | Scaffold | Role):
            yield from walk(node.children, (*above, node))


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


@dataclass(frozen=True, init=False)
class Import:
    """A module that a prompt takes from its schema.

    Parameters
    ----------
    name : str
        The module's name.
    arguments : mapping of str to str
        A text for each of its parameters; an empty one leaves the parameter out.
    children : sequence of (Import or str)
        The modules to take of those nested in it, and new text among them.
    """

    name: str
    arguments: Mapping[str, str]
    children: tuple[PromptNode, ...]
    place: Place = field(compare=False)

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, str] | None = None,
        children: str | Sequence[PromptNode | str] = (),
        place: Place = Place(),
    ) -> None:
        _set(self, name=name, arguments=dict(arguments or {}), children=nodes_of(children, Import, Text), place=place)

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.arguments.items())), self.children))


PromptNode: TypeAlias = Import | Text | Turn


def nodes_of(children: Any, *kinds: type) -> Any:
    """Return children as a tuple of nodes of these kinds, strings as text."""
    given = (children,) if isinstance(children, str) else children
    nodes = tuple(Text(child) if isinstance(child, str) else child for child in given)
    for node in nodes:
        if not isinstance(node, kinds):
            raise getattr(node, "place", Place()).error(
                f"{node!r:.60} is a {type(node).__name__}; what stands there is {', '.join(each.__name__ for each in kinds)}"
            )
    return nodes


def _set(node: object, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(node, name, value)
