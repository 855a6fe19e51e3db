"""From elements to the tree of a schema, and to the nodes of a prompt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from cacheblend_rag.pml.files import Files
from cacheblend_rag.pml.nodes import (
    MAX_PARAM_LENGTH,
    ROLES,
    Module,
    Node,
    Param,
    Role,
    RoleName,
    Scaffold,
    SchemaTree,
    Text,
    Union,
)
from cacheblend_rag.pml.parse import Element, RawText, parse
from cacheblend_rag.pml.prompt import Import, NewText, PromptNode, Turn
from cacheblend_rag.pml.space import ends_its_line, tidy

__all__ = ["SchemaReader", "read_prompt"]

_PARAMS = ("param", "parameter")
_TAGS = ("module", "union", *_PARAMS, "scaffold", "include", *ROLES)
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "schema": ("name",),
    "module": ("name", "src"),
    "union": (),
    "scaffold": (),
    "include": ("src",),
    "param": ("name", "len", "length"),
    "parameter": ("name", "len", "length"),
    **dict.fromkeys(ROLES, ()),
}
_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")
_MAX_INCLUDES = 1000


class SchemaReader:
    """Reads a schema and the files that it names.

    Parameters
    ----------
    files : Files, optional
        Where files are read; by default nowhere.
    """

    def __init__(self, files: Files | None = None) -> None:
        self._files = files
        self._reading: list[Path] = []
        self._includes = 0

    def read(self, text: str, source: str | None = None, path: Path | None = None) -> SchemaTree:
        """Read a schema, not yet validated as a whole.

        Parameters
        ----------
        text : str
            The document.
        source : str, optional
            Its name, for messages.
        path : Path, optional
            Its file, which it must not include.

        Returns
        -------
        SchemaTree
            The schema.

        Raises
        ------
        PMLError
            If the document is not well-formed, holds elements or attributes that are not known, or names a file that cannot be
            read.
        """
        root = parse(text, source)
        if root.tag != "schema":
            hint = "; this is a prompt, and prompts are read for a schema" if root.tag == "prompt" else ""
            raise root.place.error(f'<{root.tag:.60}> is no schema; expected <schema name="...">{hint}')
        name = _attributes(root, ("name",))["name"]
        if path is not None:
            self._reading.append(path.resolve())
        children = self._children(root)
        if path is not None:
            self._reading.pop()
        return SchemaTree(name, tuple(children), source)

    def _children(self, element: Element, *, strip: bool = False) -> list[Node]:
        nodes: list[Node] = []
        for item in tidy(element, _PARAMS, strip=strip):
            if isinstance(item, RawText):
                nodes.append(Text(item.text, item.place))
            elif item.tag == "include":
                nodes += self._include(item)
            else:
                nodes.append(self._node(item, element))
        return nodes

    def _node(self, element: Element, parent: Element) -> Node:
        tag, place = element.tag, element.place
        if tag == "module":
            return self._module(element, parent)
        if tag in _PARAMS:
            return _param(element)
        if tag == "union":
            _attributes(element)
            return Union(tuple(self._members(element)), place)
        if tag == "scaffold":
            _attributes(element)
            return Scaffold(tuple(self._children(element)), place)
        if tag in ROLES:
            _attributes(element)
            return Role(tag, tuple(self._children(element, strip=True)), place)
        near = difflib.get_close_matches(tag, _TAGS, n=1)
        hint = f"did you mean <{near[0]}>?" if near else f"expected one of {', '.join(f'<{each}>' for each in _TAGS)}"
        raise place.error(f"<{tag:.60}> is not known in a schema; {hint} Text with angle brackets is written with &lt;")

    def _module(self, element: Element, parent: Element) -> Module:
        attributes = _attributes(element, ("name",))
        src = attributes.get("src")
        if src is None:
            children = self._children(element)
        else:
            if any(isinstance(child, Element) or child.text.strip() for child in element.children):
                raise element.place.error(
                    f"module {attributes['name']!r:.60} has both src={src[:60]!r} and content; keep one of them"
                )
            children = [Text(self._read_file(src, element)[0], element.place)]
        if ends_its_line(element, parent) and not _ends_line(children):
            children = _with_line_break(children)
        return Module(attributes["name"], tuple(children), element.place)

    def _members(self, element: Element) -> Iterable[Module]:
        for node in self._children(element):
            if isinstance(node, Text):
                raise node.place.error(f"text {node.text.strip()!r:.40} stands in a union; only modules stand there")
            if not isinstance(node, Module):
                raise node.place.error("only modules stand in a union; expected <module>, or </union>")
            yield node

    def _include(self, element: Element) -> tuple[Node, ...]:
        src = _attributes(element, ("src",))["src"]
        _must_be_empty(element)
        text, path = self._read_file(src, element)
        if path in self._reading:
            files = [*self._reading[self._reading.index(path) :], path]
            raise element.place.error(
                f"the schema includes itself: {' -> '.join(each.name for each in files)}; take one of these includes out"
            )
        self._includes += 1
        if self._includes > _MAX_INCLUDES:
            raise element.place.error(f"the schema includes more than {_MAX_INCLUDES} files; put some of them together")
        return self.read(text, src, path).children

    def _read_file(self, src: str, element: Element) -> tuple[str, Path]:
        if self._files is None:
            raise element.place.error(
                f"src={src[:60]!r} names a file, and this schema was given no folder to read files from; give root=..."
            )
        return self._files.read(src, element.place)


def read_prompt(text: str, schema: str, source: str | None = None) -> tuple[tuple[PromptNode, ...], Element]:
    """Read the nodes of a prompt.

    Parameters
    ----------
    text : str
        The document.
    schema : str
        The name of the schema that it must be for.
    source : str, optional
        Its name, for messages.

    Returns
    -------
    tuple
        The nodes, and the root element.

    Raises
    ------
    PMLError
        If the document is not well-formed, or no prompt for this schema.
    """
    root = parse(text, source)
    if root.tag != "prompt":
        raise root.place.error(f'<{root.tag:.60}> is no prompt; expected <prompt schema="{schema}">')
    named = _attributes(root, ("schema",), allowed=("schema",))["schema"]
    if named != schema:
        raise root.place.error(f"the prompt is for schema {named!r:.60}; expected schema={schema!r}")
    return tuple(_prompt_nodes(root)), root


def _prompt_nodes(element: Element) -> Iterable[PromptNode]:
    is_root = element.tag == "prompt"
    for item in tidy(element, (), strip=is_root):
        if isinstance(item, RawText):
            yield NewText(item.text, item.place)
        elif item.tag in ROLES:
            yield _turn(item)
        else:
            yield _import(item)


def _turn(element: Element) -> Turn:
    _attributes(element)
    inner = next((child for child in element.children if isinstance(child, Element)), None)
    if inner is not None:
        raise inner.place.error(
            f"<{inner.tag:.60}> stands in the prompt's <{element.tag}>, which holds text only; import modules before it"
        )
    text = "".join(item.text for item in tidy(element, (), strip=True) if isinstance(item, RawText))
    return Turn(cast(RoleName, element.tag), text, element.place)


def _import(element: Element) -> Import:
    attributes = dict(element.attributes)
    name = element.tag
    if name == "module":
        # A name that is no XML name is imported like this.
        name = _attributes(element, ("name",), allowed=tuple(attributes))["name"]
        del attributes["name"]
    children = []
    for node in _prompt_nodes(element):
        if isinstance(node, Turn):
            raise node.place.error(f"<{node.role}> stands in the import of {name!r:.60}; put it behind all imports")
        children.append(node)
    return Import(name, attributes, children, element.place)


def _attributes(
    element: Element, required: tuple[str, ...] = (), *, allowed: tuple[str, ...] | None = None
) -> dict[str, str]:
    """The attributes of an element, which has those that are required and none that is unknown."""
    allowed = _ATTRIBUTES[element.tag] if allowed is None else allowed
    for name in element.attributes:
        if name not in allowed:
            expected = f"expected {', '.join(allowed)}" if allowed else "it has none"
            raise element.place.error(f"<{element.tag}> has no attribute {name!r:.60}; {expected}")
    for name in required:
        if not element.attributes.get(name, "").strip():
            raise element.place.error(f'<{element.tag}> needs {name}="..."')
    return element.attributes


def _param(element: Element) -> Param:
    attributes = _attributes(element, ("name",))
    _must_be_empty(element)
    lengths = [attributes[each] for each in ("len", "length") if each in attributes]
    if len(lengths) != 1:
        how = "has both len and length; keep one of them" if lengths else 'needs len="..."'
        raise element.place.error(
            f"<{element.tag}> {how}, the most tokens that an argument for {attributes['name']!r:.60} may have"
        )
    number = _NUMBER.fullmatch(lengths[0])
    if number is None:
        raise element.place.error(
            f'<{element.tag}> has len="{lengths[0]:.40}"; give a whole number of tokens from 1 to {MAX_PARAM_LENGTH}'
        )
    return Param(attributes["name"], int(number[1]), element.place)


def _must_be_empty(element: Element) -> None:
    if any(isinstance(child, Element) or child.text.strip() for child in element.children):
        raise element.place.error(f"<{element.tag}> holds something; expected <{element.tag} .../>")


def _ends_line(nodes: Iterable[Node]) -> bool:
    """Whether nodes end with a line break, or with nothing to which one could be added."""
    last = list(nodes)[-1:]
    if not last:
        return True
    node = last[0]
    if isinstance(node, Text):
        return node.text.endswith("\n")
    if isinstance(node, Union):
        return all(_ends_line(member.children) for member in node.members)
    return not isinstance(node, Param) and not isinstance(node, Text) and _ends_line(node.children)


def _with_line_break(nodes: list[Node]) -> list[Node]:
    last = nodes[-1]
    if isinstance(last, Text):
        return [*nodes[:-1], Text(last.text + "\n", last.place)]
    return [*nodes, Text("\n", last.place)]
