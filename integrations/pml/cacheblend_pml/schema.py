"""Schemas, and the prompts that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_pml.checks import check_prompt, check_schema, walk_imports
from cacheblend_pml.nodes import (
    Children,
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
    nodes_of,
    walk,
)
from cacheblend_pml.read import SchemaReader, read_prompt, read_text

if TYPE_CHECKING:
    from cacheblend_rag.chunk import BlendPrompt
    from cacheblend_rag.engine import Engine

__all__ = ["PMLText", "Prompt", "Schema"]

_PYTHON = Place()


@dataclass(frozen=True, init=False)
class Schema:
    """A validated schema: prompt modules, where they stand to each other, and which of them exclude each other.

    Parameters
    ----------
    name : str
        Its name, by which prompts say which schema they are for.
    children : sequence of (str, Module, Union, Scaffold or Role)
        What it consists of, in order. A string is text of every prompt.
    source : str, optional
        Where its text came from, for messages.

    Raises
    ------
    PMLError
        If two modules have one name, or two parameters of a module; if a name, a length or a nesting has no meaning; if a module,
        a union or the schema is empty; if there are messages, and something stands outside of them.
    """

    name: str
    children: tuple[Node, ...]
    source: str | None = field(compare=False)

    def __init__(self, name: str, children: Children, source: str | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "children", nodes_of(children, Text, Module, Union, Scaffold, Role))
        object.__setattr__(self, "source", source)
        check_schema(name, self.children, source)

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
        reader = SchemaReader(path.parent if root is None else Path(root), path.name)
        return cls(*reader.read(read_text(path)), path.name)

    @classmethod
    def from_text(cls, text: str, *, root: str | Path | None = None, source: str | None = None) -> Schema:
        """Read a schema from a string, called `source` in messages; see `from_file`. Without `root` no file is read."""
        return cls(*SchemaReader(None if root is None else Path(root), source).read(text), source)

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
        return Prompt(self, *read_prompt(text, self.name, source))

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


@dataclass(frozen=True, init=False)
class Prompt:
    """A prompt that was checked against its schema, but not against a model: imports and new text, in order, then messages."""

    schema: Schema
    children: tuple[PromptNode, ...]
    place: Place = field(compare=False)

    def __init__(self, schema: Schema, children: str | Sequence[PromptNode | str], place: Place = _PYTHON) -> None:
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "children", nodes_of(children, Import, Turn, Text))
        object.__setattr__(self, "place", place)
        check_prompt(self.children, schema.name, schema.modules, schema.parents, schema.unions)

    @cached_property
    def imports(self) -> dict[str, Import]:
        """The imports by name, nested ones included."""
        return {node.name: node for node, _ in walk_imports(self.children)}

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
            return replace(node, arguments=arguments, children=tuple(map(changed, node.children)))

        return replace(self, children=tuple(map(changed, self.children)))

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
        names = [f"{module}-{number}" for number in range(1, len(texts) + 1)]
        documents: list[Node] = []
        for name, text in zip(names, texts, strict=True):
            documents += [Module(name, text, place), *([Text(separator, place)] if separator else [])]
        nodes = _replaced(self.schema.children, Module, module, documents)
        imports = _replaced(self.children, Import, module, [Import(name) for name in names])
        return Prompt(Schema(self.schema.name, nodes, self.schema.source), imports, self.place)

    def plain_text(self) -> str:
        """Return what the prompt says, for people and logs: without the words of a chat template, new text after its import."""
        new: dict[str, list[str]] = {}
        last = ""

        def in_prompt(nodes: Sequence[PromptNode]) -> None:
            nonlocal last
            for node in nodes:
                if isinstance(node, Import):
                    last = node.name
                    in_prompt(node.children)
                else:
                    new.setdefault(last, []).append(node.text)

        def in_schema(nodes: Sequence[Node], module: str) -> Iterator[str]:
            for node in nodes:
                if isinstance(node, Text):
                    yield node.text
                elif isinstance(node, Param):
                    yield self.imports[module].arguments[node.name]
                elif not isinstance(node, Module):
                    yield from in_schema(node.children, module)
                elif node.name in self.imports:
                    yield from in_schema(node.children, node.name)
                    yield from new.get(node.name, ())

        in_prompt(self.children[: self.body_length])
        after = [node.text for node in self.children[self.body_length :] if not isinstance(node, Import)]
        return "".join([*new.get("", ()), *in_schema(self.schema.children, ""), *after])


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


def _replaced(nodes: Sequence[Any], kind: type[Any], name: str, by: Sequence[Any]) -> tuple[Any, ...]:
    """Nodes with others in the place of the one of a kind and name, at whatever depth it stands."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(node, kind) and node.name == name:
            found += by
        elif hasattr(node, "children"):
            found.append(replace(node, children=_replaced(node.children, kind, name, by)))
        else:
            found.append(node)
    return tuple(found)


def _texts_of(nodes: Sequence[PromptNode]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Import):
            yield from node.arguments.values()
            yield from _texts_of(node.children)
        else:
            yield node.text
