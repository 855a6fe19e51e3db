"""From templates to schemas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import Module, Node, Param, Role, Text, Union
from cacheblend_rag.pml.plan import Branch, Choice, Decision, Item, MessageItem, Nested, Plan, TakenModule, Variable
from cacheblend_rag.pml.template_framework import read_framework_template
from cacheblend_rag.pml.template_function import MaxTokens, read_function
from cacheblend_rag.pml.template_text import read_braces, read_jinja

__all__ = ["MaxTokens", "read_template"]

_READERS = {"jinja": read_jinja, "f-string": read_braces}
_NO_NAME = re.compile(r"[^\w.-]+")


def read_template(
    template: Any, name: str | None, lengths: Mapping[str, int], format: str | None
) -> tuple[str, tuple[Node, ...], Plan]:
    """Turn a template into the children of a schema; see `Schema.from_template`.

    Returns
    -------
    tuple of (str, tuple of Node, Plan)
        The schema's name, its children, and how values choose among its modules.

    Raises
    ------
    PMLError
        If it is no template, says something that a schema cannot say, or a variable has no length.
    """
    defaults: Mapping[str, Any] = {}
    if isinstance(template, str):
        if format not in _READERS:
            raise PMLError(
                f"a template that is a string needs format=, one of {', '.join(map(repr, _READERS))}; got {format!r:.40}"
            )
        items: tuple[Item, ...] = _READERS[format](template)
    elif format is not None:
        raise PMLError(
            f"format={format!r:.40} is for templates that are strings, and this is a {type(template).__name__}"
        )
    elif inspect.isfunction(template):
        items, defaults = read_function(template)
        name = name or template.__name__
    else:
        items = read_framework_template(template)
    if name is None:
        raise PMLError("a template that is no function has no name; give the schema one: name=...")
    maker = _Maker(lengths)
    children, modules = maker.make(name, items)
    unused = sorted(lengths.keys() - maker.variables.keys())
    if unused:
        raise PMLError(
            f"lengths has {unused[0]!r:.60}, which is no variable of the template; it has {', '.join(maker.variables) or 'none'}"
        )
    known = {variable: value for variable, value in defaults.items() if variable in maker.variables}
    return name, children, Plan(modules, tuple(maker.variables), known)


@dataclass
class _Maker:
    """Turns the items of a template into nodes, and remembers what values decide."""

    lengths: Mapping[str, int]
    variables: dict[str, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def make(self, name: str, items: tuple[Item, ...]) -> tuple[tuple[Node, ...], tuple[TakenModule, ...]]:
        """Make the top of the schema: one module, or one in each message."""
        if not any(isinstance(item, MessageItem) for item in items):
            module, taken = self._module(name, items)
            return ((module,), (taken,)) if module.children else ((), ())
        children: list[Node] = []
        modules: list[TakenModule] = []
        for item in items:
            if not isinstance(item, MessageItem):
                raise PMLError("a template of messages has something between them; put it into one of them")
            module, taken = self._module(f"{name}-{item.role}", item.items)
            children.append(Role(item.role, (module,) if module.children else ()))
            if module.children:
                modules.append(taken)
        return tuple(children), tuple(modules)

    def _module(self, label: str, items: Iterable[Item]) -> tuple[Module, TakenModule]:
        name = self._unused(_NO_NAME.sub("-", label).strip("-") or "module", self.names)
        nodes: list[Node] = []
        arguments: dict[str, str] = {}
        children: list[TakenModule | Decision] = []
        for item in _joined(items):
            if isinstance(item, str):
                nodes.append(Text(item))
            elif isinstance(item, Variable):
                param = self._unused(item.name, set(arguments))
                arguments[param] = item.name
                nodes.append(Param(param, self._length(item), item.place))
            elif isinstance(item, Choice):
                made, decision = self._choice(item)
                nodes += made
                children.append(decision)
            elif isinstance(item, Nested):
                module, taken = self._module(item.name, item.items)
                if module.children:
                    nodes.append(module)
                    children.append(taken)
            else:
                raise PMLError(
                    f"a message of the {item.role} stands inside of other text; put it at the template's top"
                )
        return Module(name, tuple(nodes)), TakenModule(name, arguments, tuple(children))

    def _choice(self, choice: Choice) -> tuple[list[Node], Decision]:
        modules: list[Module] = []
        decided = []
        for branch in choice.branches:
            if branch.condition is not None:
                self.variables[branch.condition.variable] = None
            module, taken = self._module(self._label(branch, choice), branch.items)
            if module.children:
                modules.append(module)
            decided.append((branch.condition, taken if module.children else None))
        nodes: list[Node] = [*modules] if len(modules) < 2 else [Union(tuple(modules), choice.place)]
        return nodes, tuple(decided)

    def _label(self, branch: Branch, choice: Choice) -> str:
        if branch.condition is not None:
            return branch.condition.label
        first = choice.branches[0].condition
        return f"no-{first.label}" if first is not None and len(choice.branches) == 2 else "otherwise"

    def _length(self, variable: Variable) -> int:
        self.variables[variable.name] = None
        length = self.lengths.get(variable.name, variable.length)
        if length is None:
            raise variable.place.error(
                f"variable {variable.name!r:.60} has no length; say how many tokens its value has at most: "
                f"lengths={{{variable.name!r}: 32}}"
            )
        return length

    def _unused(self, name: str, taken: set[str]) -> str:
        free = name
        number = 2
        while free in taken:
            free, number = f"{name}-{number}", number + 1
        taken.add(free)
        return free


def _joined(items: Iterable[Item]) -> Iterator[Item]:
    """Items with texts that meet put together, and without empty ones."""
    text = ""
    for item in items:
        if isinstance(item, str):
            text += item
            continue
        if text:
            yield text
            text = ""
        yield item
    if text:
        yield text
