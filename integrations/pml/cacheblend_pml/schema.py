"""Schemas, and the prompts that are made of them: what both mean, and what is refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_pml.nodes import (
    MAX_DEPTH,
    MAX_PARAM_LENGTH,
    ROLES,
    Import,
    Module,
    Node,
    Param,
    Place,
    PromptNode,
    Role,
    Scaffold,
    Text,
    Turn,
    Union,
    prompt_nodes,
    walk,
)
from cacheblend_pml.read import SchemaReader, parse_prompt, read_text
from cacheblend_pml.template import Template, read_template
from cacheblend_rag.errors import PMLError

if TYPE_CHECKING:
    from cacheblend_rag.chunk import BlendPrompt
    from cacheblend_rag.engine import Engine

__all__ = ["PMLText", "Prompt", "Schema"]

_PARAM_NAME = re.compile(r"[^\W\d][\w.-]*")
_MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class Schema:
    """A validated schema: prompt modules, where they stand to each other, and which of them exclude each other.

    Parameters
    ----------
    name : str
        Its name, by which prompts say which schema they are for.
    children : sequence of Node
        What it consists of.
    source : str, optional
        Where its text came from, for messages.
    template : Template, optional
        If it was made of one: how values choose among its modules.

    Raises
    ------
    PMLError
        If two modules have one name, or two parameters of a module; if a name, a length or a nesting has no meaning; if a module,
        a union or the schema is empty; if there are messages, and something stands outside of them.
    """

    name: str
    children: tuple[Node, ...]
    source: str | None = field(default=None, compare=False)
    template: Template | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", tuple(self.children))
        _check_schema(self)

    @classmethod
    def from_file(cls, path: str | Path, *, root: str | Path | None = None) -> Schema:
        """Read a schema from a file.

        Parameters
        ----------
        path : str or Path
            The file, UTF-8.
        root : str or Path, optional
            The folder below which ``src=`` may name files, from which their paths count; by default the file's own.

        Raises
        ------
        PMLError
            If the file cannot be read, or the schema is wrong; the message says where.
        """
        path = Path(path)
        reader = SchemaReader(path.parent if root is None else Path(root))
        return cls(*reader.read(read_text(path), path.name, path), path.name)

    @classmethod
    def from_text(cls, text: str, *, root: str | Path | None = None, source: str | None = None) -> Schema:
        """Read a schema from a string.

        Parameters
        ----------
        text : str
            The schema.
        root : str or Path, optional
            The folder below which ``src=`` may name files; by default no file is read.
        source : str, optional
            What the text is called in messages.

        Raises
        ------
        PMLError
            If the schema is wrong; the message says where.
        """
        return cls(*SchemaReader(None if root is None else Path(root)).read(text, source), source)

    @classmethod
    def from_template(
        cls,
        template: Any,
        *,
        name: str | None = None,
        lengths: Mapping[str, int] | None = None,
        format: str | None = None,
    ) -> Schema:
        """Turn a template into a schema, so that its fixed text is encoded once.

        The whole becomes a module, or one in each message. Variables become parameters; what stands under an ``if`` becomes a
        module; the branches of ``if`` and ``else`` the members of a union; a template called by another one a nested module.
        `fill` makes prompts of values.

        Parameters
        ----------
        template : function, str, or a prompt template of LangChain or LlamaIndex
            A function yields its texts, or returns one, and its source is read instead of being run. It may have ``if``,
            ``match`` and ``yield from`` another such function. A string is Jinja, with ``{{ name }}`` and ``{% if %}``, or has
            ``{name}`` as `str.format` knows it.
        name : str, optional
            The schema's name; by default the function's.
        lengths : mapping of str to int, optional
            The most tokens that the value of each variable may have. A function can say it by
            ``Annotated[str, MaxTokens(5)]``.
        format : str, optional
            "jinja" or "f-string", for a string.

        Raises
        ------
        PMLError
            If the template does something that no schema can say, a loop for example, or a variable has no length.
        """
        found, children, read = read_template(template, name, lengths or {}, format)
        return cls(found, children, None, read)

    def fill(self, values: Mapping[str, Any] | None = None, *more: Turn | str) -> Prompt:
        """Make a prompt of a schema that was a template.

        Parameters
        ----------
        values : mapping of str to Any
            A value for each variable.
        *more : Turn or str
            New text after it, and messages.

        Returns
        -------
        Prompt
            The prompt that says what the template says with these values.

        Raises
        ------
        PMLError
            If the schema was no template, or a value is missing or belongs to no variable.
        """
        if self.template is None:
            raise PMLError(
                f"schema {self.name!r} was not made of a template; make its prompts with prompt or parse_prompt"
            )
        return self.prompt(*self.template.imports(values or {}), *more)

    def prompt(self, *parts: PromptNode | str) -> Prompt:
        """Make a prompt of imports and new text.

        Parameters
        ----------
        *parts : Import, Turn or str
            What the prompt consists of, in order. A string is text and never markup, wherever it comes from. Messages stand last.

        Raises
        ------
        PMLError
            If the prompt does not fit the schema.
        """
        return Prompt(self, parts)

    def parse_prompt(self, text: str, *, source: str | None = None) -> Prompt:
        """Read a prompt from markup.

        Parameters
        ----------
        text : str
            The document: ``<prompt schema="...">``.
        source : str, optional
            What the text is called in messages.

        Raises
        ------
        PMLError
            If the document is not well-formed, or does not fit the schema; the message says where.
        """
        return Prompt(self, *parse_prompt(text, self.name, source))

    def read_prompt(self, path: str | Path) -> Prompt:
        """Read a prompt from a file of markup; see `parse_prompt`."""
        path = Path(path)
        return self.parse_prompt(read_text(path), source=path.name)

    @cached_property
    def modules(self) -> dict[str, Module]:
        """All modules by their names, in reading order, nested ones included."""
        return {node.name: node for node, _ in walk(self.children) if isinstance(node, Module)}

    @cached_property
    def parents(self) -> dict[str, str | None]:
        """The name of the module that each module is nested in, None for those at the top."""
        return {
            node.name: next((each.name for each in reversed(above) if isinstance(each, Module)), None)
            for node, above in walk(self.children)
            if isinstance(node, Module)
        }

    @cached_property
    def unions(self) -> tuple[tuple[str, ...], ...]:
        """The names of each union's members, in reading order."""
        return tuple(
            tuple(member.name for member in node.children) for node, _ in walk(self.children) if isinstance(node, Union)
        )

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The messages in reading order."""
        return tuple(node for node, _ in walk(self.children) if isinstance(node, Role))


@dataclass(frozen=True)
class Prompt:
    """A prompt that was checked against its schema, but not against a model: imports and new text, in order, then messages."""

    schema: Schema
    children: Sequence[PromptNode | str]
    place: Place = field(default=Place(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "children", prompt_nodes(self.children))
        _check_prompt(self)

    @cached_property
    def imports(self) -> dict[str, Import]:
        """The imports by name, nested ones included."""
        return {each.name: each for each, _ in _with_parents(self.children, None)}

    @property
    def body_length(self) -> int:
        """Number of children up to the last import; new text and messages follow."""
        imports = [number for number, node in enumerate(self.children, 1) if isinstance(node, Import)]
        return imports[-1] if imports else 0

    def blend(self, engine: Engine) -> BlendPrompt:
        """Return the prompt as an engine takes it, as `Schemas.prompt` does."""
        from cacheblend_pml import Schemas

        return Schemas(engine).prompt(self)

    def texts(self) -> Iterator[str]:
        """Yield what the prompt brings along: arguments and new text, in reading order."""
        return _texts_of(self.children)

    def map_texts(self, change: Callable[[str], str]) -> Prompt:
        """Return the prompt with `change` applied to each of its `texts`; what comes out is text and never markup."""

        def changed(node: PromptNode) -> PromptNode:
            if not isinstance(node, Import):
                return replace(node, text=change(node.text))
            arguments = {name: change(text) for name, text in node.arguments.items()}
            return replace(node, arguments=arguments, children=tuple(map(changed, prompt_nodes(node.children))))

        return replace(self, children=tuple(map(changed, prompt_nodes(self.children))))

    def check_documents(self, module: str) -> None:
        """Raise `PMLError` if documents cannot be put into the place of a module."""
        if module not in self.imports:
            raise self.place.error(
                f"the documents belong in the place of module {module!r}, which the prompt does not import; it imports "
                f"{', '.join(self.imports) or 'none'}"
            )
        if any(module in union for union in self.schema.unions):
            raise self.place.error(
                f"module {module!r} is a member of a union, of which a prompt imports one at most; put the documents into the "
                "place of a module outside of unions"
            )

    def put_documents(self, module: str, texts: Sequence[str], separator: str = "\n\n") -> Prompt:
        """Put documents into the place of a module, each as a module of its own: ``name-1``, ``name-2`` and so on.

        Each is tokenised as it stands, so the KV of a stored chunk with the same text is reused. A `separator` follows each.
        What stands in the module is not used. The prompt's schema has the same name and these modules.
        """
        self.check_documents(module)
        place = self.schema.modules[module].place
        documents = [Module(f"{module}-{number}", (Text(text, place),), place) for number, text in enumerate(texts, 1)]

        def in_schema(nodes: Sequence[Node]) -> Iterator[Node]:
            for node in nodes:
                if isinstance(node, Text | Param):
                    yield node
                elif not isinstance(node, Module) or node.name != module:
                    yield replace(node, children=tuple(in_schema(node.children)))  # type: ignore[arg-type]
                else:
                    for document in documents:
                        yield document
                        if separator:
                            yield Text(separator, place)

        def in_prompt(nodes: Sequence[PromptNode | str]) -> Iterator[PromptNode | str]:
            for node in nodes:
                if not isinstance(node, Import):
                    yield node
                elif node.name != module:
                    yield replace(node, children=tuple(in_prompt(node.children)))
                else:
                    yield from (Import(document.name) for document in documents)

        schema = Schema(self.schema.name, tuple(in_schema(self.schema.children)), self.schema.source)
        return Prompt(schema, tuple(in_prompt(self.children)), self.place)

    def plain_text(self) -> str:
        """Return what the prompt says, for people and logs: without the words of a chat template, new text after its import."""
        texts: list[tuple[str | None, str]] = []

        def in_schema(nodes: Sequence[Node], module: str | None) -> None:
            for node in nodes:
                if isinstance(node, Text):
                    texts.append((module, node.text))
                elif isinstance(node, Param):
                    texts.append((module, self.imports[module or ""].arguments[node.name]))
                elif not isinstance(node, Module):
                    in_schema(node.children, module)
                elif node.name in self.imports:
                    in_schema(node.children, node.name)

        def in_prompt(nodes: Sequence[PromptNode | str], after: int) -> int:
            for node in prompt_nodes(nodes):
                if isinstance(node, Import):
                    own = [number for number, (module, _) in enumerate(texts, 1) if module == node.name]
                    after = in_prompt(node.children, own[-1] if own else after)
                else:
                    texts.insert(after, (None, node.text))
                    after += 1
            return after

        in_schema(self.schema.children, None)
        in_prompt(self.children[: self.body_length], 0)
        in_prompt(self.children[self.body_length :], len(texts))
        return "".join(text for _, text in texts)


class PMLText(str):
    """The plain text of a schema's prompt, which carries the prompt itself to a model that reads it.

    Frameworks hand models that are no chat models a string. This one is the prompt's words for whatever shows or caches it.
    """

    cacheblend_prompt: Prompt

    @classmethod
    def of(cls, prompt: Prompt) -> PMLText:
        """Return the text of a prompt."""
        text = cls(prompt.plain_text())
        text.cacheblend_prompt = prompt
        return text


def _texts_of(nodes: Sequence[PromptNode | str]) -> Iterator[str]:
    for node in prompt_nodes(nodes):
        if isinstance(node, Import):
            yield from node.arguments.values()
            yield from _texts_of(node.children)
        else:
            yield node.text


def _check_schema(schema: Schema) -> None:
    place = Place(schema.source)
    if not isinstance(schema.name, str) or not schema.name.strip():
        raise place.error(f"the schema's name is {schema.name!r}; give it a name")
    if not schema.children:
        raise place.error(f"schema {schema.name!r} is empty; put text or modules into it")
    modules: dict[str, Module] = {}
    for node, above in walk(schema.children):
        if not isinstance(node, Text | Param | Module | Union | Scaffold | Role):
            raise place.error(
                f"a schema cannot hold {node!r:.40}, a {type(node).__name__}; give Text, Param, Module ..."
            )
        if len(above) >= MAX_DEPTH:
            raise node.place.error(f"the schema is nested deeper than {MAX_DEPTH}; flatten it")
        if isinstance(node, Param):
            _check_param(node, above)
        elif isinstance(node, Module):
            _check_module(node, modules)
        elif not isinstance(node, Text | Role) and not node.children:
            raise node.place.error(f"the {type(node).__name__.lower()} is empty; put modules into it")
        elif isinstance(node, Union):
            for member in node.children:
                if not isinstance(member, Module):
                    raise member.place.error(
                        f"{_called(member)} is in a union, which may hold only modules: expected <module>, or </union>"
                    )
        elif isinstance(node, Scaffold):
            outer = next((each for each in above if isinstance(each, Scaffold)), None)
            if outer is not None:
                raise node.place.error(
                    f"the scaffold stands in the one at {outer.place}; all that is in a scaffold is encoded together anyway"
                )
        elif isinstance(node, Role):
            _check_role(node, above)
    if schema.roles:
        _check_messages(schema)


def _check_param(node: Param, above: Sequence[Node]) -> None:
    owner = next((each for each in reversed(above) if not isinstance(each, Scaffold)), None)
    if not isinstance(owner, Module):
        raise node.place.error(
            f"parameter {node.name!r} stands in no module; a prompt gives arguments to the modules that it imports, so put a "
            "<module> around it"
        )
    if not isinstance(node.name, str) or not _PARAM_NAME.fullmatch(node.name):
        raise node.place.error(
            f"{node.name!r:.60} cannot name a parameter; a name begins with a letter or _, and has letters, digits, _, - and ."
        )
    if not isinstance(node.length, int) or not 1 <= node.length <= MAX_PARAM_LENGTH:
        raise node.place.error(
            f"parameter {node.name!r} has the length {node.length!r:.40}; give the most tokens an argument may have, from 1 "
            f"to {MAX_PARAM_LENGTH}"
        )
    twin = next(each for each in owner.params if each.name == node.name)
    if twin is not node:
        raise node.place.error(
            f"module {owner.name!r} has a parameter {node.name!r} already, at {twin.place}; give each a name of its own"
        )


def _check_module(node: Module, modules: dict[str, Module]) -> None:
    if not isinstance(node.name, str) or not node.name.strip() or len(node.name) > _MAX_NAME_LENGTH:
        raise node.place.error(
            f"{node.name!r:.60} cannot name a module; give 1 to {_MAX_NAME_LENGTH} characters, not all of them blank"
        )
    twin = modules.setdefault(node.name, node)
    if twin is not node:
        raise node.place.error(
            f"there is a module {node.name!r} already, at {twin.place}; prompts import modules by name, so each needs a name of "
            "its own in the whole schema"
        )
    if all(isinstance(child, Text) and not child.text for child in node.children):
        raise node.place.error(f"module {node.name!r} is empty; put text into it, or leave it out")


def _check_role(node: Role, above: Sequence[Node]) -> None:
    if node.role not in ROLES:
        raise node.place.error(f"unknown role {node.role!r}; take one of {', '.join(ROLES)}")
    owner = next((each for each in above if not isinstance(each, Scaffold)), None)
    if owner is not None:
        raise node.place.error(
            f"<{node.role}> stands in {_called(owner)}; messages stand at the schema's top, and modules in them, since a chat "
            "template must see every message"
        )


def _check_messages(schema: Schema) -> None:
    first = schema.roles[0]
    for node, above in walk(schema.children):
        if not isinstance(node, Role | Scaffold) and all(isinstance(each, Scaffold) for each in above):
            raise node.place.error(
                f"{_called(node)} is outside of the messages; this schema has <{first.role}> at {first.place}, and a chat "
                "template knows no words outside of messages: put it into one of them"
            )


def _called(node: Node) -> str:
    if isinstance(node, Module):
        return f"module {node.name!r}"
    if isinstance(node, Role):
        return f"<{node.role}>"
    if isinstance(node, Text):
        return f"text {node.text.strip()!r:.40}"
    return f"a {type(node).__name__.lower()}"


def _check_prompt(prompt: Prompt) -> None:
    schema = prompt.schema
    taken: dict[str, Import] = {}
    for node, parent in _with_parents(prompt.children, None):
        _check_name(schema, node, parent)
        if node.name in taken:
            raise node.place.error(
                f"module {node.name!r} was imported at {taken[node.name].place}; a prompt imports a module once"
            )
        taken[node.name] = node
        _check_arguments(schema, node)
    for members in schema.unions:
        # In the order of the prompt, so that the one is named that should not have been added.
        both = [one for name, one in taken.items() if name in members]
        if len(both) > 1:
            raise both[1].place.error(
                f"module {both[1].name!r} and module {both[0].name!r} are members of one union, of which a prompt imports one at "
                f"most; leave one of them out. The members are {', '.join(members[:8])}{', ...' if len(members) > 8 else ''}"
            )
    turn: Turn | None = None
    for child in prompt.children:
        if isinstance(child, Turn):
            if child.role not in ROLES:
                raise child.place.error(f"unknown role {child.role!r}; take one of {', '.join(ROLES)}")
            turn = child
        elif turn is not None and isinstance(child, Import | Text):
            what = f"<{child.name}>" if isinstance(child, Import) else "text"
            raise child.place.error(
                f"{what} stands after the <{turn.role}> at {turn.place}; a prompt's own messages come last, after all imports "
                "and text"
            )


def _with_parents(nodes: Sequence[PromptNode | str], parent: str | None) -> Iterator[tuple[Import, str | None]]:
    """Every import with the name of the one that it stands in."""
    for node in nodes:
        if isinstance(node, Turn) and parent is not None:
            raise node.place.error(f"<{node.role}> stands in the import of {parent!r}; put it after all imports")
        if isinstance(node, Import):
            yield node, parent
            yield from _with_parents(node.children, node.name)


def _check_name(schema: Schema, node: Import, parent: str | None) -> None:
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
    shown, above = f"<{node.name}/>", schema.parents[node.name]
    while above is not None:
        shown, above = f"<{above}>{shown}", schema.parents[above]
    raise node.place.error(f"module {node.name!r} is nested in module {owner!r}; import it inside of that: {shown}...")


def _check_arguments(schema: Schema, node: Import) -> None:
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
