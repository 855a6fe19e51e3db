"""Templates that are Python functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import Place
from cacheblend_rag.pml.plan import Branch, Choice, Condition, Item, Nested, Variable

__all__ = ["MaxTokens", "read_function"]

# A variable of the caller, or a value that is known when the function is read.
_Bound = Variable | str


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """How many tokens the value of a parameter has at most: ``duration: Annotated[str, MaxTokens(5)]``."""

    tokens: int


def read_function(function: Callable[..., Any]) -> tuple[tuple[Item, ...], dict[str, Any]]:
    """Read a function that yields texts, or returns one.

    Its source is read and it is never called. ``if`` and ``match`` become choices, values of parameters variables, and
    ``yield from`` another such function a nested template.

    Parameters
    ----------
    function : callable
        The function.

    Returns
    -------
    tuple of (tuple of Item, dict)
        What it says, and the defaults of its parameters.

    Raises
    ------
    PMLError
        If its source cannot be read, it does more than this, or calls itself.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    bound: dict[str, _Bound] = {name: Variable(name, length) for name, length in _lengths(function).items()}
    return tuple(_Reader(function, bound, ()).items()), defaults


def _lengths(function: Callable[..., Any]) -> dict[str, int | None]:
    """The parameters of a function, and how many tokens their values may have."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise PMLError(f"the annotations of {function.__name__} cannot be read: {error}") from error
    lengths: dict[str, int | None] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PMLError(
                f"{function.__name__} takes *{name}; a template has a fixed number of parameters, each with a name"
            )
        found = [each.tokens for each in getattr(hints.get(name), "__metadata__", ()) if isinstance(each, MaxTokens)]
        lengths[name] = found[0] if found else None
    return lengths


class _Reader:
    """Reads one function with its parameters bound to variables of the outermost one, or to texts."""

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, _Bound], callers: tuple[Any, ...]) -> None:
        code = inspect.unwrap(function).__code__
        self._source, self._first = code.co_filename.rpartition("/")[2], code.co_firstlineno
        if code in callers:
            raise Place(self._source, self._first).error(
                f"{function.__name__} calls itself, so that its text has no end; a template calls other templates only"
            )
        self._function = inspect.unwrap(function)
        self._bound = bound
        self._callers = (*callers, code)

    def items(self) -> Iterator[Item]:
        """Yield what the function says."""
        try:
            source = textwrap.dedent(inspect.getsource(self._function))
            tree = ast.parse(source).body[0]
        except (OSError, SyntaxError, TypeError) as error:
            raise PMLError(f"the source of {self._function.__name__} cannot be read: {error}") from error
        if not isinstance(tree, ast.FunctionDef):
            raise PMLError(f"{self._function.__name__} is no plain function; write it with def")
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        if body and isinstance(body[-1], ast.Return) and body[-1].value is not None:
            yield from self._statements(body[:-1])
            yield from self._text(body[-1].value)
        else:
            yield from self._statements(body)

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[Item]:
        for node in body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield) and node.value.value is not None:
                yield from self._text(node.value.value)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.YieldFrom):
                yield self._call(node.value.value)
            elif isinstance(node, ast.If):
                yield from self._choose(list(self._if_branches(node)), node)
            elif isinstance(node, ast.Match):
                yield from self._choose(list(self._match_branches(node)), node)
            elif not isinstance(node, ast.Pass):
                raise self._refused(node, "yield of a text, yield from a template, if, match, or one return at the end")

    def _text(self, node: ast.expr) -> Iterator[Item]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            for part in node.values:
                yield from self._text(part)
        elif isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            yield self._variable(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from self._text(node.left)
            yield from self._text(node.right)
        elif isinstance(node, ast.Name):
            yield self._variable(node)
        else:
            raise self._refused(node, "a text, an f-string with names of parameters, or a sum of these")

    def _variable(self, node: ast.expr) -> _Bound:
        if isinstance(node, ast.Name) and node.id in self._bound:
            bound = self._bound[node.id]
            return bound if isinstance(bound, str) else Variable(bound.name, bound.length, self._place(node))
        raise self._refused(
            node, f"a parameter of {self._function.__name__}: {', '.join(self._bound) or 'it has none'}"
        )

    def _call(self, node: ast.expr) -> Nested:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self._refused(node, "the call of a template by its name")
        names = inspect.getclosurevars(self._function)
        called = {**names.globals, **names.nonlocals}.get(node.func.id)
        if not inspect.isfunction(called):
            raise self._refused(node, f"{node.func.id} to be a function")
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            raise self._refused(node, "arguments one by one")
        given = {str(each.arg): each.value for each in node.keywords}
        try:
            whole = inspect.signature(called).bind(*node.args, **given)
        except TypeError as error:
            raise self._refused(node, f"other arguments ({error})") from None
        lengths = _lengths(called)
        bound: dict[str, _Bound] = {}
        for name, length in lengths.items():
            value = whole.arguments.get(name, inspect.signature(called).parameters[name].default)
            if isinstance(value, ast.Constant):
                value = value.value
            if isinstance(value, ast.expr):
                outer = self._variable(value)
                bound[name] = outer if isinstance(outer, str) else Variable(outer.name, length or outer.length)
            elif isinstance(value, str):
                bound[name] = value
            else:
                raise self._refused(node, f"a parameter or a text for {name}")
        return Nested(node.func.id, tuple(_Reader(called, bound, self._callers).items()))

    def _if_branches(self, node: ast.If) -> Iterator[tuple[Condition | bool, list[ast.stmt]]]:
        yield self._condition(node.test), node.body
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            yield from self._if_branches(node.orelse[0])
        elif node.orelse:
            yield True, node.orelse

    def _match_branches(self, node: ast.Match) -> Iterator[tuple[Condition | bool, list[ast.stmt]]]:
        for case in node.cases:
            pattern = case.pattern
            if case.guard is not None:
                raise self._refused(case.guard, "no guard")
            if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
                yield self._test(node.subject, "equal", pattern.value.value), case.body
            elif isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
                yield True, case.body
            else:
                raise self._refused(case.body[0], "cases that are texts, numbers or _")

    def _condition(self, node: ast.expr) -> Condition | bool:
        if isinstance(node, ast.Name):
            return self._test(node, "true")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._test(node.operand, "false")
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            other = node.comparators[0]
            if isinstance(other, ast.Constant):
                return self._test(node.left, "equal", other.value)
        raise self._refused(node, 'a parameter, not a parameter, or parameter == "value"')

    def _test(self, node: ast.expr, test: Any, value: Any = None) -> Condition | bool:
        """A condition on a variable; what it comes to, on a text that is known."""
        bound = self._variable(node)
        if isinstance(bound, str):
            return Condition("", test, value).holds({"": bound})
        return Condition(bound.name, test, value)

    def _choose(self, branches: list[tuple[Condition | bool, list[ast.stmt]]], node: ast.stmt) -> Iterator[Item]:
        open_branches: list[Branch] = []
        for condition, body in branches:
            if condition is False:
                continue
            items = tuple(self._statements(body))
            if condition is True and not open_branches:
                yield from items
                return
            open_branches.append(Branch(None if condition is True else condition, items))
            if condition is True:
                break
        if open_branches:
            yield Choice(tuple(open_branches), self._place(node))

    def _place(self, node: ast.expr | ast.stmt) -> Place:
        return Place(self._source, self._first + node.lineno - 1, node.col_offset + 1)

    def _refused(self, node: ast.expr | ast.stmt, expected: str) -> PMLError:
        return self._place(node).error(
            f"a schema cannot say {ast.unparse(node).splitlines()[0]!r:.80}, since its text must be known before any value is; "
            f"expected {expected}"
        )
