"""Templates that are strings: Jinja, and names in braces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter

from jinja2 import Environment, TemplateSyntaxError, nodes

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import Place
from cacheblend_rag.pml.plan import Branch, Choice, Condition, Item, Variable

__all__ = ["read_braces", "read_jinja", "read_single_braces"]

_NAME = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
_SOURCE = "template"


def read_braces(template: str, values: Mapping[str, str] | None = None) -> tuple[Item, ...]:
    """Read a template as `str.format` does: ``{name}``, with ``{{`` for a brace.

    Parameters
    ----------
    template : str
        The template.
    values : mapping of str to str, optional
        Values that are given already.

    Raises
    ------
    PMLError
        If a brace is not closed, or a field is more than a name.
    """
    items: list[Item] = []
    try:
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise PMLError(f"{error}; write {{{{ for a brace that is text", source=_SOURCE) from None
    for text, name, spec, conversion in fields:
        items.append(text)
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise PMLError(
                f"{{{name:.60}}} is more than a name; compute it before, and write {{name}}, or {{{{ for a brace that is text",
                source=_SOURCE,
            )
        items.append(_value(name, values))
    return tuple(items)


def read_single_braces(template: str, values: Mapping[str, str] | None = None) -> tuple[Item, ...]:
    """Read a template in which ``{name}`` is a variable and all other braces are text, as LlamaIndex has them."""
    items: list[Item] = []
    end = 0
    for match in _NAME.finditer(template):
        items += [template[end : match.start()], _value(match[1], values)]
        end = match.end()
    return (*items, template[end:])


def read_jinja(template: str, values: Mapping[str, str] | None = None) -> tuple[Item, ...]:
    """Read a Jinja template of text, ``{{ name }}``, and ``{% if %}`` with names, ``not`` and ``==``.

    Raises
    ------
    PMLError
        If it is no Jinja, or does more: loops and filters have no fixed text.
    """
    try:
        tree = Environment(keep_trailing_newline=True).parse(template)
    except TemplateSyntaxError as error:
        raise PMLError(f"{error.message}", source=_SOURCE, line=error.lineno) from None
    return tuple(_items(tree.body, values or {}))


def _items(body: Iterable[nodes.Node], values: Mapping[str, str]) -> Iterable[Item]:
    for node in body:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                if isinstance(part, nodes.TemplateData):
                    yield part.data
                elif isinstance(part, nodes.Const):
                    yield str(part.value)
                elif isinstance(part, nodes.Name):
                    yield _value(part.name, values, node.lineno)
                else:
                    raise _refused(part, "{{ name }}")
        elif isinstance(node, nodes.If):
            branches = [Branch(_condition(each.test), tuple(_items(each.body, values))) for each in (node, *node.elif_)]
            if node.else_:
                branches.append(Branch(None, tuple(_items(node.else_, values))))
            yield Choice(tuple(branches), _place(node))
        else:
            raise _refused(node, "text, {{ name }} or {% if name %}")


def _condition(test: nodes.Node) -> Condition:
    if isinstance(test, nodes.Name):
        return Condition(test.name, "true")
    if isinstance(test, nodes.Not) and isinstance(test.node, nodes.Name):
        return Condition(test.node.name, "false")
    if isinstance(test, nodes.Compare) and isinstance(test.expr, nodes.Name) and len(test.ops) == 1:
        operand = test.ops[0]
        if operand.op == "eq" and isinstance(operand.expr, nodes.Const):
            return Condition(test.expr.name, "equal", operand.expr.value)
    raise _refused(test, 'a name, not a name, or name == "value"')


def _refused(node: nodes.Node, expected: str) -> PMLError:
    return _place(node).error(
        f"a schema cannot say what {type(node).__name__} does, since its text must be known before any value is; expected "
        f"{expected}"
    )


def _place(node: nodes.Node) -> Place:
    return Place(_SOURCE, node.lineno)


def _value(name: str, values: Mapping[str, str] | None, line: int | None = None) -> Item:
    if values and name in values:
        return values[name]
    return Variable(name, place=Place(_SOURCE, line))
