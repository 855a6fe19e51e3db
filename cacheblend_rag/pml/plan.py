"""What a template consists of, whatever language it was written in, and what values make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import Place, RoleName
from cacheblend_rag.pml.prompt import Import

__all__ = ["Branch", "Choice", "Condition", "Item", "MessageItem", "Nested", "Plan", "TakenModule", "Variable"]


@dataclass(frozen=True, slots=True)
class Variable:
    """A place for a value, of at most `length` tokens where the template says so."""

    name: str
    length: int | None = None
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a value must be: true, false, or equal to something."""

    variable: str
    test: Literal["true", "false", "equal"]
    value: Any = None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether it holds for these values."""
        value = values[self.variable]
        if self.test == "equal":
            return bool(value == self.value)
        return bool(value) == (self.test == "true")

    @property
    def label(self) -> str:
        """A name for the text that depends on it."""
        if self.test == "equal":
            return f"{self.variable}-{self.value}"
        return self.variable if self.test == "true" else f"not-{self.variable}"


@dataclass(frozen=True, slots=True)
class Branch:
    """What a template says under a condition, or else (None)."""

    condition: Condition | None
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The first branch whose condition holds is taken, if any: if, elif, else."""

    branches: tuple[Branch, ...]
    place: Place = field(default=Place(), compare=False)


@dataclass(frozen=True, slots=True)
class Nested:
    """What another template says, called by its name."""

    name: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class MessageItem:
    """A message of a chat; a template consists of messages only, or has none."""

    role: RoleName
    items: tuple[Item, ...]


Item: TypeAlias = "str | Variable | Choice | Nested | MessageItem"


@dataclass(frozen=True)
class TakenModule:
    """A module that a template was turned into, and what of it a prompt takes.

    Attributes
    ----------
    name : str
        The module.
    arguments : dict of str to str
        The variable whose value goes into each of its parameters.
    children : tuple
        What is nested in it: modules that are always taken, and choices, each a sequence of a condition and a module, or None
        where nothing is said.
    """

    name: str
    arguments: Mapping[str, str]
    children: tuple[TakenModule | Decision, ...]

    def imports(self, values: Mapping[str, Any]) -> Import:
        """Return the import of this module for these values."""
        arguments = {param: str(values[variable]) for param, variable in self.arguments.items()}
        return Import(self.name, arguments, tuple(_imports(self.children, values)))


Decision: TypeAlias = tuple[tuple["Condition | None", "TakenModule | None"], ...]


@dataclass(frozen=True)
class Plan:
    """How values choose among the modules of a schema that was a template.

    Attributes
    ----------
    modules : tuple of TakenModule
        The modules that every prompt imports.
    variables : tuple of str
        The names of all values that are needed.
    defaults : dict of str to Any
        Values where none are given.
    """

    modules: tuple[TakenModule, ...]
    variables: tuple[str, ...]
    defaults: Mapping[str, Any]

    def imports(self, values: Mapping[str, Any]) -> list[Import]:
        """Return the imports of a prompt.

        Raises
        ------
        PMLError
            If a value is missing, or belongs to no variable.
        """
        unknown = sorted(values.keys() - set(self.variables))
        if unknown:
            raise PMLError(
                f"the template has no variable {unknown[0]!r:.60}; it has {', '.join(self.variables) or 'none'}"
            )
        whole = {**self.defaults, **values}
        missing = [name for name in self.variables if name not in whole]
        if missing:
            raise PMLError(
                f"the template needs a value for {missing[0]!r}; give {', '.join(f'{name}=...' for name in missing)}"
            )
        return list(_imports(self.modules, whole))


def _imports(children: Sequence[TakenModule | Decision], values: Mapping[str, Any]) -> Iterator[Import]:
    for child in children:
        if isinstance(child, TakenModule):
            yield child.imports(values)
            continue
        for condition, module in child:
            if condition is None or condition.holds(values):
                if module is not None:
                    yield module.imports(values)
                break
