"""The nodes that schemas and prompts consist of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from cacheblend_rag.errors import PMLError

__all__ = [
    "MAX_DEPTH",
    "MAX_PARAM_LENGTH",
    "ROLES",
    "Import",
    "MaxTokens",
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
    "prompt_nodes",
    "walk",
]

RoleName = Literal["system", "user", "assistant"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)

MAX_DEPTH = 64
"""The deepest that elements may be nested."""

MAX_PARAM_LENGTH = 100_000
"""The most tokens that a parameter may reserve."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a text, counted from 1, for messages; without a line for what was made in Python."""

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
    """Text as the model reads it; in a prompt, text that the schema does not have."""

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
        return tuple(
            node
            for node, above in walk(self.children)
            if isinstance(node, Param) and all(isinstance(each, Scaffold) for each in above)
        )


@dataclass(frozen=True, slots=True)
class Union:
    """Modules of which a prompt imports one at most; they share a start position and the size of the largest."""

    children: tuple[Module, ...]
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


Node: TypeAlias = Text | Param | Module | Union | Scaffold | Role


def walk(nodes: Sequence[Node], above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Yield every node in reading order with those that it stands in, outermost first."""
    for node in nodes:
        yield node, above
        if isinstance(node, Module | Union | Scaffold | Role):
            yield from walk(node.children, (*above, node))


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """The most tokens that the value of a template's parameter has: ``duration: Annotated[str, MaxTokens(5)]``."""

    tokens: int


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
    children : sequence of (Import, Text or str)
        The modules to take of those nested in it, and new text among them.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    children: Sequence[PromptNode | str] = ()
    place: Place = field(default=Place(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", dict(self.arguments))
        object.__setattr__(self, "children", prompt_nodes(self.children))

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.arguments.items())), self.children))


PromptNode: TypeAlias = Import | Text | Turn


def prompt_nodes(children: Sequence[PromptNode | str]) -> tuple[PromptNode, ...]:
    """Return the children of a prompt or an import, strings as new text."""
    for child in children:
        if not isinstance(child, str | Import | Text | Turn):
            raise PMLError(f"a prompt holds {child!r:.40}, a {type(child).__name__}; give Import, Turn or text")
    return tuple(Text(child) if isinstance(child, str) else child for child in children)
