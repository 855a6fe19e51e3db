"""Reader of markup: documents to the nodes of schemas and prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent
from typing import Any

from lxml import etree

from cacheblend_pml.nodes import (
    MAX_DEPTH,
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
)
from cacheblend_rag.errors import PMLError

__all__ = ["SchemaReader", "read_prompt", "read_text", "schema_beside"]

_PARAMS = ("param", "parameter")
_SAID = "holds text, <module>, <union> and <scaffold>"
# What an error of the grammar says of the element.
_EXPECTED: dict[str, str] = {
    "schema": f'<schema name="..."> {_SAID}, or else messages: <system>, <user> and <assistant>',
    "module": f'<module name="..."> {_SAID}, and <param>; with src="FILE" it is empty',
    "union": "<union> holds nothing but at least one <module>",
    "scaffold": "<scaffold> holds what may stand in its place, but no other scaffold",
    "param": '<param name="..." len="N"/> is empty, its name one that XML allows, and N from 1 to 100000',
    "parameter": '<parameter name="..." length="N"/> is empty, its name one that XML allows, and N from 1 to 100000',
    **{role: f"<{role}> stands at the top of the schema and {_SAID}" for role in ROLES},
}
_MAX_FILE_BYTES = 64 * 2**20
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
# Stand for elements in a text; XML cannot have these characters.
_BLOCK, _INLINE = "\0", "\1"


@dataclass(frozen=True)
class SchemaReader:
    """Reads a schema and the files that it names below a folder, symbolic links followed; without one, it reads no file."""

    folder: Path | None = None
    source: str | None = None

    def read(self, text: str) -> tuple[str, tuple[Node, ...]]:
        """Return the name and the children of a schema, which is not yet validated as a whole."""
        root = _parse(text, "schema", self.source)
        # Not shared between threads, since it keeps the errors of its last document.
        grammar = etree.RelaxNG(etree.parse(Path(__file__).with_name("pml.rng")))
        if not grammar.validate(root):
            error = grammar.error_log[0]
            there = (each for each in root.iter() if each.sourceline == error.line)
            element = next((each for each in there if root.getroottree().getpath(each) == error.path), root)
            misplaced = element is not root and error.type_name in ("RELAXNG_ERR_ELEMWRONG", "RELAXNG_ERR_EXTRACONTENT")
            around = [*([] if misplaced else [element]), *element.iterancestors()]
            expected = next(_EXPECTED[each.tag] for each in around if each.tag in _EXPECTED)
            shown = " ".join([element.tag, *(f"{name}={value!r}" for name, value in element.attrib.items())])
            raise _place(element, self.source).error(f"<{shown:.80}> is wrong: {error.message}; {expected}")
        return root.get("name"), tuple(self._nodes(root))

    def _nodes(self, element: etree._Element) -> Iterator[Node]:
        for item in _items(element, self.source):
            yield item if isinstance(item, Text) else self._node(item)

    def _node(self, element: etree._Element) -> Node:
        tag, place = element.tag, _place(element, self.source)
        if tag in _PARAMS:
            return Param(element.get("name").strip(), int(element.get("len") or element.get("length")), place)
        children: list[Any] = list(self._nodes(element))
        if tag == "module":
            src = element.get("src")
            if src is not None:
                if children:
                    raise place.error(f"<module> has both src={src[:60]!r} and content; keep one of them")
                children = [Text(self._file(src, place), place)]
            if children and _ends_line(element):
                last = children[-1]
                if isinstance(last, Text):
                    children[-1] = replace(last, text=last.text.removesuffix("\n") + "\n")
                elif not _ends_line(element[-1]):
                    children.append(Text("\n", place))
            return Module(element.get("name"), children, place)
        if tag == "union":
            return Union(children, place)
        return Scaffold(children, place) if tag == "scaffold" else Role(tag, children, place)

    def _file(self, name: str, place: Place) -> str:
        """The text of a file that the schema names."""
        shown = f"src={name[:100]!r}"
        if self.folder is None:
            raise place.error(f"{shown} names a file, and this schema has no folder to read files from; give root=...")
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):
                raise place.error(
                    f"{shown} lies outside of the folder {self.folder.name!r}, below which files are read"
                )
            # Reading a pipe without a writer would wait for ever.
            if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
                raise place.error(f"{shown} is no file there of at most {_MAX_FILE_BYTES} bytes; correct the name")
            return path.read_text(encoding="utf-8-sig")
        # A circle of links is a RuntimeError, and text in another encoding a ValueError.
        except (OSError, RuntimeError, UnicodeError) as error:
            raise place.error(f"{shown} cannot be read: {error}; it must be text in UTF-8") from error


def read_prompt(text: str, schema: str, source: str | None = None) -> tuple[tuple[PromptNode, ...], Place]:
    """Return the nodes of a prompt for the schema of a name, and where the prompt begins."""
    root = _parse(text, "prompt", source)
    place = _place(root, source)
    if root.get("schema") != schema:
        raise place.error(f"the prompt is for schema {root.get('schema')!r:.60}; expected schema={schema!r}")
    _no_attributes(root, place, "schema")
    return tuple(_prompt_nodes(root, source)), place


def _prompt_nodes(element: etree._Element, source: str | None) -> Iterator[PromptNode]:
    for item in _items(element, source):
        if isinstance(item, Text):
            yield item
            continue
        place = _place(item, source)
        if item.tag in ROLES:
            _no_attributes(item, place)
            if len(item):
                raise place.error(
                    f"<{item.tag}> of a prompt holds <{item[0].tag:.60}>, and may hold only text; import before it"
                )
            yield Turn(item.tag, "".join(each.text for each in _items(item, source)), place)
            continue
        attributes = {name: value for name, value in item.attrib.items() if name != _SPACE}
        # A name that XML does not allow is imported like this.
        name = attributes.pop("name", "") if item.tag == "module" else item.tag
        if not name:
            raise place.error('<module> in a prompt needs name="...", the module to import')
        yield Import(name, attributes, tuple(_prompt_nodes(item, source)), place)


def _no_attributes(element: etree._Element, place: Place, *known: str) -> None:
    for name in element.attrib:
        if name not in (_SPACE, *known):
            raise place.error(
                f"<{element.tag}> of a prompt has the attribute {name!r:.60}, which means nothing; leave it out"
            )


def read_text(path: Path) -> str:
    """Return the text of a file that a user named; `PMLError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise PMLError(f"{path} cannot be read: {error}; give a file of text in UTF-8", source=path.name) from error


def schema_beside(prompt: Path) -> Path:
    """Return the file beside a prompt that has the name of its schema; `PMLError` if there is none."""
    root = _parse(read_text(prompt), "prompt", prompt.name)
    name = root.get("schema", "")
    # A name is not a path: what a prompt says must not lead out of its folder.
    beside = prompt.with_name(f"{name}{prompt.suffix}") if name and name == Path(name).name else prompt
    if beside == prompt or not beside.is_file():
        raise _place(root, prompt.name).error(
            f"next to the prompt there is no file of its schema, {name!r:.60}; name it with --schema FILE"
        )
    return beside


def _parse(text: str, tag: str, source: str | None) -> etree._Element:
    """Read a document and return its root, a `tag`; `PMLError` if it is not well-formed, has a DTD, or is nested too deep."""
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True
    )
    try:
        root = etree.fromstring(text.encode(), parser)
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise Place(source, line).error(f"{text[error.start]!r} is half of a character; write all of it") from None
    except etree.XMLSyntaxError as error:
        raise Place(source, max(error.lineno or 1, 1)).error(
            f"this is not XML: {error.msg}; close every element, and write &lt; for < and &amp; for &"
        ) from None
    place = _place(root, source)
    if root.getroottree().docinfo.internalDTD is not None:
        raise place.error("a document type (<!DOCTYPE ...>) is not allowed, so that no entity can expand; leave it out")
    if root.tag != tag:
        raise place.error(f"expected <{tag}> around everything, not <{root.tag:.60}>")
    for element in root.xpath(f"//*[namespace-uri()] | //*[count(ancestor::*) >= {MAX_DEPTH}]"):
        reason = (
            f"is nested deeper than {MAX_DEPTH}" if element.tag[0] != "{" else "is in a namespace, and PML has none"
        )
        raise _place(element, source).error(f"<{element.tag:.60}> {reason}; write it without")
    return root


def _place(element: etree._Element, source: str | None) -> Place:
    return Place(source, element.sourceline)


def _items(element: etree._Element, source: str | None) -> list[Any]:
    """The texts and elements in an element, without the white space that is only there for people."""
    marks = ((_INLINE if child.tag in _PARAMS else _BLOCK) + (child.tail or "") for child in element)
    content = "".join([element.text or "", *marks])
    if not _keeps_space(element):
        content = _tidy(content)
        if element.tag in (*ROLES, "prompt"):
            content = content.strip()
    place = _place(element, source)
    texts = [Text(text, place) if text else None for text in re.split(f"[{_BLOCK}{_INLINE}]", content)]
    return [item for pair in zip_longest(texts, element) for item in pair if item is not None]


def _tidy(content: str) -> str:
    """Take out the indentation that all lines have in common, and line breaks and white space around elements.

    White space around inline elements stays, as they are parts of a sentence.
    """
    first, line_break, rest = content.partition("\n")
    content = first + line_break + dedent(rest)
    content = re.sub(rf"(\A|{_BLOCK})\s*\n", r"\1", content)
    content = re.sub(rf"\n[ \t]*{_BLOCK}", f"\n{_BLOCK}", content)
    content = re.sub(r"\n\s*\Z", "\n", content)
    return re.sub(rf"(\A|{_BLOCK})\s+(?={_BLOCK}|\Z)", r"\1", content)


def _keeps_space(element: etree._Element) -> bool:
    return bool(element.xpath("(ancestor-or-self::*/@xml:space)[last()] = 'preserve'"))


def _ends_line(element: etree._Element) -> bool:
    """Whether nothing but white space follows an element in its line."""
    return re.match(r"[ \t]*\n", element.tail or "") is not None and not _keeps_space(element.getparent())
