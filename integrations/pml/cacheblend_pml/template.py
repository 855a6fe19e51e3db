"""Compiler of templates (functions, strings, those of the frameworks) to modules of a schema, and of values to its imports."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from string import Formatter
from typing import Any, Literal, TypeAlias, get_type_hints

from jinja2 import Environment, TemplateSyntaxError, nodes

from cacheblend_pml.nodes import Import, MaxTokens, Module, Node, Param, Place, Role, RoleName, Text, Union
from cacheblend_rag.errors import PMLError

__all__ = ["Template", "read_template"]

_NO_NAME = re.compile(r"[^\w.-]+")
_SINGLE_BRACES = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
_SOURCE = "template"
_ROLES: dict[str, RoleName] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "chatbot": "assistant",
    "HumanMessagePromptTemplate": "user",
    "AIMessagePromptTemplate": "assistant",
    "SystemMessagePromptTemplate": "system",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """A place for a value, of at most `length` tokens where the template says so."""

    name: str
    length: int | None = None
    place: Place = field(default=Place())


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of a value: that it is true, false, or equal to something."""

    variable: str
    test: Literal["true", "false", "equal"]
    value: Any = None

    def holds(self, values: Mapping[str, Any]) -> bool:
        value = values[self.variable]
        return bool(value == self.value) if self.test == "equal" else bool(value) == (self.test == "true")

    @property
    def label(self) -> str:
        """A name for the text that depends on it."""
        if self.test == "equal":
            return f"{self.variable}-{self.value}"
        return self.variable if self.test == "true" else f"not-{self.variable}"


@dataclass(slots=True)
class Block:
    """Text that becomes a module: the whole, a message with its `role`, another template, or a branch.

    A branch is taken on its `condition`, an else without one. The module has the `label` for its name if no other one has; that
    name is `module`, which is empty for a block that says nothing.
    """

    label: str
    items: Sequence[Item]
    condition: Condition | None = None
    role: RoleName | None = None
    module: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The first branch whose condition holds is taken, if any: if, elif, else."""

    branches: Sequence[Block]
    place: Place = field(default=Place())


Item: TypeAlias = str | Variable | Choice | Block


@dataclass(frozen=True)
class Template:
    """A template's blocks, and how values choose among the modules that were made of them."""

    blocks: Sequence[Block]
    variables: tuple[str, ...]
    defaults: Mapping[str, Any]

    def imports(self, values: Mapping[str, Any]) -> list[Import]:
        """Return the imports of a prompt; `PMLError` if a value is missing, or belongs to no variable."""
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
        return list(_imports(self.blocks, whole))


def _imports(items: Sequence[Item], values: Mapping[str, Any]) -> Iterator[Import]:
    for item in items:
        block = item if isinstance(item, Block) else None
        if isinstance(item, Choice):
            holding = (each for each in item.branches if each.condition is None or each.condition.holds(values))
            block = next(holding, None)
        if block is not None and block.module:
            arguments = {param: str(values[variable.name]) for param, variable in _params(block)}
            yield Import(block.module, arguments, tuple(_imports(block.items, values)))


def _params(block: Block) -> Iterator[tuple[str, Variable]]:
    """The parameters of a block's module: each use of a variable is one of its own."""
    uses: Counter[str] = Counter()
    for item in block.items:
        if isinstance(item, Variable):
            uses[item.name] += 1
            yield item.name if uses[item.name] == 1 else f"{item.name}-{uses[item.name]}", item


def read_template(
    template: Any, name: str | None, lengths: Mapping[str, int], format: str | None
) -> tuple[str, tuple[Node, ...], Template]:
    """Return the name and the children of a schema, and how values choose among its modules; see `Schema.from_template`."""
    defaults: Mapping[str, Any] = {}
    if isinstance(template, str):
        readers = {"jinja": _read_jinja, "f-string": _read_braces}
        if format not in readers:
            raise PMLError(
                f"a template that is a string needs format=, one of {', '.join(map(repr, readers))}; got {format!r:.40}"
            )
        items = readers[format](template, {})
    elif format is not None:
        raise PMLError(
            f"format={format!r:.40} is for templates that are strings, and this is a {type(template).__name__}"
        )
    elif inspect.isfunction(template):
        bound = {each: Variable(each, length) for each, length in _lengths(template).items()}
        items = list(_Function(template, bound, ()).items())
        defaults = _defaults(template)
        name = name or template.__name__
    else:
        items = _read_framework_template(template)
    if name is None:
        raise PMLError("only a function has a name of its own; give the schema one: name=...")
    blocks = [item for item in items if isinstance(item, Block) and item.role is not None] or [Block(name, items)]
    maker = _Maker(lengths)
    children: list[Node] = []
    for block in blocks:
        if block.role is None:
            children += maker.make(block)
        else:
            block.label = f"{name}-{block.role}"
            children.append(Role(block.role, tuple(maker.make(block))))
    unused = sorted(lengths.keys() - maker.variables.keys())
    if unused:
        raise PMLError(
            f"unknown variable {unused[0]!r:.60} in lengths; the template has {', '.join(maker.variables) or 'none'}"
        )
    known = {variable: value for variable, value in defaults.items() if variable in maker.variables}
    return name, tuple(children), Template(blocks, tuple(maker.variables), known)


@dataclass
class _Maker:
    """Turns blocks into modules, and tells them their names."""

    lengths: Mapping[str, int]
    variables: dict[str, None] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def make(self, block: Block) -> list[Module]:
        """Return the module of a block; none if it says nothing."""
        label = _NO_NAME.sub("-", block.label).strip("-") or "module"
        name, number = label, 2
        while name in self.names:
            name, number = f"{label}-{number}", number + 1
        self.names.add(name)
        params = _params(block)
        children: list[Node] = []
        for is_text, group in groupby(block.items, lambda item: isinstance(item, str)):
            if is_text:
                text = "".join(map(str, group))
                children += [Text(text)] if text else []
                continue
            for item in group:
                if isinstance(item, Variable):
                    children.append(Param(next(params)[0], self._length(item), item.place))
                elif isinstance(item, Choice):
                    children += self._choice(item)
                elif isinstance(item, Block):
                    children += self.make(item)
        block.module = name if children else ""
        return [Module(name, tuple(children))] if children else []

    def _choice(self, choice: Choice) -> Sequence[Node]:
        first = choice.branches[0].condition
        modules: list[Module] = []
        for branch in choice.branches:
            if branch.condition is not None:
                self.variables[branch.condition.variable] = None
                branch.label = branch.condition.label
            else:
                branch.label = f"no-{first.label}" if first is not None and len(choice.branches) == 2 else "otherwise"
            modules += self.make(branch)
        return modules if len(modules) < 2 else [Union(tuple(modules), choice.place)]

    def _length(self, variable: Variable) -> int:
        self.variables[variable.name] = None
        length = self.lengths.get(variable.name, variable.length)
        if length is None:
            raise variable.place.error(
                f"variable {variable.name!r:.60} has no length; say how many tokens its value has at most: "
                f"lengths={{{variable.name!r}: 32}}"
            )
        return length


def _read_braces(template: str, values: Mapping[str, str]) -> list[Item]:
    """Read a template as `str.format` does: ``{name}``, with ``{{`` for a brace."""
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
    return items


def _read_single_braces(template: str, values: Mapping[str, str]) -> list[Item]:
    """Read a template in which ``{name}`` is a variable and all other braces are text, as LlamaIndex has them."""
    texts = _SINGLE_BRACES.split(template)
    return [_value(text, values) if number % 2 else text for number, text in enumerate(texts)]


def _read_jinja(template: str, values: Mapping[str, str]) -> list[Item]:
    """Read a Jinja template of text, ``{{ name }}``, and ``{% if %}`` with names, ``not`` and ``==``."""
    try:
        tree = Environment(keep_trailing_newline=True).parse(template)
    except TemplateSyntaxError as error:
        raise PMLError(f"{error.message}", source=_SOURCE, line=error.lineno) from None
    return list(_jinja_items(tree.body, values))


def _jinja_items(body: Iterable[nodes.Node], values: Mapping[str, str]) -> Iterator[Item]:
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
                    raise _jinja_refused(part, "{{ name }}")
        elif isinstance(node, nodes.If):
            cases = [(_jinja_condition(each.test), each.body) for each in (node, *node.elif_)]
            branches = [Block("", list(_jinja_items(body, values)), condition) for condition, body in cases]
            if node.else_:
                branches.append(Block("", list(_jinja_items(node.else_, values))))
            yield Choice(branches, Place(_SOURCE, node.lineno))
        else:
            raise _jinja_refused(node, "text, {{ name }} or {% if name %}")


def _jinja_condition(test: nodes.Node) -> Condition:
    if isinstance(test, nodes.Name):
        return Condition(test.name, "true")
    if isinstance(test, nodes.Not) and isinstance(test.node, nodes.Name):
        return Condition(test.node.name, "false")
    if isinstance(test, nodes.Compare) and isinstance(test.expr, nodes.Name) and len(test.ops) == 1:
        operand = test.ops[0]
        if operand.op == "eq" and isinstance(operand.expr, nodes.Const):
            return Condition(test.expr.name, "equal", operand.expr.value)
    raise _jinja_refused(test, 'a name, not a name, or name == "value"')


def _jinja_refused(node: nodes.Node, expected: str) -> PMLError:
    return Place(_SOURCE, node.lineno).error(
        f"a schema cannot say what {type(node).__name__} does, since its text must be known before any value is; expected "
        f"{expected}"
    )


def _value(name: str, values: Mapping[str, str], line: int | None = None) -> Item:
    return values[name] if name in values else Variable(name, place=Place(_SOURCE, line))


def _read_framework_template(template: Any) -> list[Item]:
    """Read a prompt template of LangChain or LlamaIndex, known by what it has: neither framework is imported."""
    template = getattr(template, "default_template", template)
    partial, kwargs = (_texts(getattr(template, name, {})) for name in ("partial_variables", "kwargs"))
    if isinstance(getattr(template, "messages", None), list):
        return [_langchain_message(message, partial) for message in template.messages]
    if isinstance(getattr(template, "message_templates", None), list):
        return [
            _message(each.role, each.content, lambda text: _read_single_braces(text, kwargs))
            for each in template.message_templates
        ]
    text = getattr(template, "template", None)
    if isinstance(text, str) and hasattr(template, "template_format"):
        return _langchain_text(template, partial)
    if isinstance(text, str) and hasattr(template, "template_vars"):
        return _read_single_braces(text, kwargs)
    if isinstance(getattr(template, "template_str", None), str):
        return _read_jinja(template.template_str, kwargs)
    raise PMLError(
        f"the type {type(template).__name__} cannot be read as a template; give a function, a string with format=, or a prompt "
        "template of LangChain or LlamaIndex"
    )


def _langchain_text(template: Any, given: Mapping[str, str]) -> list[Item]:
    readers = {"f-string": _read_braces, "jinja2": _read_jinja}
    reader = readers.get(template.template_format)
    if reader is None:
        raise PMLError(f"templates in {template.template_format!r:.40} are not read; take one of {', '.join(readers)}")
    return reader(template.template, given)


def _langchain_message(message: Any, given: Mapping[str, str]) -> Block:
    kind, prompt = type(message).__name__, getattr(message, "prompt", None)
    if prompt is None:
        return _message(getattr(message, "type", kind), getattr(message, "content", None), lambda text: [text])
    inner = {**given, **_texts(getattr(prompt, "partial_variables", {}))}
    role, text = getattr(message, "role", None) or kind, getattr(prompt, "template", None)
    return _message(role, text, lambda _: _langchain_text(prompt, inner))


def _message(role: Any, text: object, read: Callable[[str], list[Item]]) -> Block:
    role = str(getattr(role, "value", role))
    if not isinstance(text, str):
        raise PMLError(f"a {role} has no text that is known before; leave it out, and give it with the prompt")
    if role not in _ROLES:
        raise PMLError(f"a message has the role {role!r:.60}; take system, user or assistant")
    return Block("", read(text), role=_ROLES[role])


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    for name, value in values.items():
        if callable(value):
            raise PMLError(f"the template computes {name!r:.60} by a function; give it a text, or leave it a variable")
    return {name: str(value) for name, value in values.items()}


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.items()
    return {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}


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


class _Function:
    """The source of a function that yields texts, or returns one; it is never called.

    Its parameters are bound to variables of the outermost function. ``if`` and ``match`` become choices, and
    ``yield from`` another such function a block of its own.
    """

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Variable], callers: tuple[Any, ...]) -> None:
        self._function = inspect.unwrap(function)
        code = self._function.__code__
        self._source, self._first = code.co_filename.rpartition("/")[2], code.co_firstlineno
        if code in callers:
            raise Place(self._source, self._first).error(
                f"{function.__name__} calls itself, so that its text has no end; a template calls other templates only"
            )
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
            raise PMLError(f"{self._function.__name__} is not a plain function; write it with def")
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
                yield Choice(list(self._if_branches(node)), self._place(node))
            elif isinstance(node, ast.Match):
                yield Choice(list(self._match_branches(node)), self._place(node))
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

    def _variable(self, node: ast.expr) -> Variable:
        if isinstance(node, ast.Name) and node.id in self._bound:
            return replace(self._bound[node.id], place=self._place(node))
        raise self._refused(
            node, f"a parameter of {self._function.__name__}: {', '.join(self._bound) or 'it has none'}"
        )

    def _call(self, node: ast.expr) -> Block:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self._refused(node, "the call of a template by its name")
        names = inspect.getclosurevars(self._function)
        called = {**names.globals, **names.nonlocals}.get(node.func.id)
        if not inspect.isfunction(called):
            raise self._refused(node, f"{node.func.id} to be a function")
        try:
            given = inspect.signature(called).bind(*node.args, **{str(each.arg): each.value for each in node.keywords})
        except TypeError as error:
            raise self._refused(node, f"other arguments ({error})") from None
        bound: dict[str, Variable] = {}
        for name, length in _lengths(called).items():
            if name not in given.arguments:
                raise self._refused(node, f"an argument for {name}, since it is not run with its default")
            outer = self._variable(given.arguments[name])
            bound[name] = replace(outer, length=length or outer.length)
        return Block(node.func.id, list(_Function(called, bound, self._callers).items()))

    def _if_branches(self, node: ast.If) -> Iterator[Block]:
        yield self._branch(node.body, self._condition(node.test))
        if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            yield from self._if_branches(node.orelse[0])
        elif node.orelse:
            yield self._branch(node.orelse)

    def _match_branches(self, node: ast.Match) -> Iterator[Block]:
        subject = self._variable(node.subject).name
        for case in node.cases:
            pattern = case.pattern
            if case.guard is None and isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant):
                yield self._branch(case.body, Condition(subject, "equal", pattern.value.value))
            elif (
                case.guard is None
                and isinstance(pattern, ast.MatchAs)
                and pattern.pattern is None
                and pattern.name is None
            ):
                yield self._branch(case.body)
            else:
                raise self._refused(case.body[0], "cases that are texts, numbers or _, without a guard")

    def _branch(self, body: Sequence[ast.stmt], condition: Condition | None = None) -> Block:
        return Block("", list(self._statements(body)), condition)

    def _condition(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.Name):
            return Condition(self._variable(node).name, "true")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Condition(self._variable(node.operand).name, "false")
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            other = node.comparators[0]
            if isinstance(other, ast.Constant):
                return Condition(self._variable(node.left).name, "equal", other.value)
        raise self._refused(node, 'a parameter, not a parameter, or parameter == "value"')

    def _place(self, node: ast.expr | ast.stmt) -> Place:
        return Place(self._source, self._first + node.lineno - 1, node.col_offset + 1)

    def _refused(self, node: ast.expr | ast.stmt, expected: str) -> PMLError:
        return self._place(node).error(
            f"a schema cannot say {ast.unparse(node).splitlines()[0]!r:.80}, since its text must be known before any value is; "
            f"expected {expected}"
        )
