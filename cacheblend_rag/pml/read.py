"""From markup to the tree of a schema, and to the nodes of a prompt."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import (
    MAX_PARAM_LENGTH,
    ROLES,
    Import,
    Module,
    Node,
    Param,
    Place,
    PromptNode,
    Role,
    RoleName,
    Scaffold,
    Text,
    Turn,
    Union,
)
from cacheblend_rag.pml.xml import Element, ends_its_line, parse, tidy

__all__ = ["SchemaReader", "parse_prompt", "read_text"]

_PARAMS = ("param", "parameter")
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "module": ("name", "src"),
    "union": (),
    **dict.fromkeys(_PARAMS, ("name", "len", "length")),
    "scaffold": (),
    "include": ("src",),
    **dict.fromkeys(ROLES, ()),
}
_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")
_MAX_INCLUDES = 1000
_MAX_FILE_BYTES = 64 * 2**20


class SchemaReader:
    """Reads a schema and the files that it names, which lie below `root`, symbolic links followed; without one, none is read."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = None if root is None else root.resolve()
        self._reading: list[Path] = []
        self._includes = 0

    def read(self, text: str, source: str | None = None, path: Path | None = None) -> tuple[str, tuple[Node, ...]]:
        """Return the name and the children of a schema, which is not yet validated as a whole.

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
        name = _attributes(root, ("name",), "name")["name"]
        if path is not None:
            self._reading.append(path.resolve())
        children = tuple(self._children(root))
        if path is not None:
            self._reading.pop()
        return name, children

    def _children(self, element: Element, *, strip: bool = False) -> Iterator[Node]:
        for item in tidy(element, _PARAMS, strip=strip):
            if isinstance(item, Text):
                yield item
            elif item.tag == "include":
                yield from self._include(item)
            else:
                yield self._node(item, element)

    def _node(self, element: Element, parent: Element) -> Node:
        tag, place = element.tag, element.place
        if tag not in _ATTRIBUTES:
            near = difflib.get_close_matches(tag, _ATTRIBUTES, n=1)
            known = ", ".join(f"<{each}>" for each in _ATTRIBUTES)
            hint = f"did you mean <{near[0]}>?" if near else f"expected one of {known}"
            raise place.error(
                f"<{tag:.60}> is not known in a schema; {hint} Text with angle brackets is written with &lt;"
            )
        attributes = _attributes(element, _ATTRIBUTES[tag], *(("name",) if tag in ("module", *_PARAMS) else ()))
        if tag == "module":
            return Module(attributes["name"], self._module_children(element, parent), place)
        if tag in _PARAMS:
            return Param(attributes["name"], _length(element), place)
        children = tuple(self._children(element, strip=tag in ROLES))
        if tag == "union":
            # That only modules stand there is checked with the whole schema.
            return Union(cast(tuple[Module, ...], children), place)
        return Scaffold(children, place) if tag == "scaffold" else Role(cast(RoleName, tag), children, place)

    def _module_children(self, element: Element, parent: Element) -> tuple[Node, ...]:
        src = element.attributes.get("src")
        children: list[Node]
        if src is None:
            children = list(self._children(element))
        elif _is_empty(element):
            children = [Text(self._read_file(src, element.place)[0], element.place)]
        else:
            raise element.place.error(
                f"module {element.attributes['name']!r:.60} has both src={src[:60]!r} and content; keep one of them"
            )
        if ends_its_line(element, parent) and not _ends_line(children):
            last = children[-1]
            if isinstance(last, Text):
                children[-1] = Text(last.text + "\n", last.place)
            else:
                children.append(Text("\n", last.place))
        return tuple(children)

    def _include(self, element: Element) -> tuple[Node, ...]:
        src = _attributes(element, _ATTRIBUTES["include"], "src")["src"]
        _must_be_empty(element)
        text, path = self._read_file(src, element.place)
        if path in self._reading:
            files = [*self._reading[self._reading.index(path) :], path]
            raise element.place.error(
                f"the schema includes itself: {' -> '.join(each.name for each in files)}; take one of these includes out"
            )
        self._includes += 1
        if self._includes > _MAX_INCLUDES:
            raise element.place.error(f"the schema includes more than {_MAX_INCLUDES} files; put some of them together")
        return self.read(text, src, path)[1]

    def _read_file(self, name: str, place: Place) -> tuple[str, Path]:
        """The text of a file that the schema names, and where it is."""
        shown = f"src={name[:100]!r}"
        if self._root is None:
            raise place.error(
                f"{shown} names a file, and this schema was given no folder to read files from; give root=..."
            )
        if not name or "\0" in name:
            raise place.error(f'{shown} names no file; write src="..." with a path below {self._root.name!r}')
        try:
            path = (self._root / name).resolve()
            if not path.is_relative_to(self._root):
                raise place.error(f"{shown} lies outside of the folder {self._root.name!r}, below which files are read")
            data = _read_bytes(path)
            return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"), path
        except UnicodeDecodeError as error:
            raise place.error(f"{shown} is not UTF-8 (byte {error.start}); convert it") from None
        except UnicodeEncodeError:
            raise place.error(f"{shown} is no name that a file can have") from None
        except (OSError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise place.error(f"{shown} cannot be read: {reason}") from error


def parse_prompt(text: str, schema: str, source: str | None = None) -> tuple[tuple[PromptNode, ...], Place]:
    """Return the nodes of a prompt for the schema of a name, and where the prompt begins.

    Raises
    ------
    PMLError
        If the document is not well-formed, or no prompt for this schema.
    """
    root = parse(text, source)
    if root.tag != "prompt":
        raise root.place.error(f'<{root.tag:.60}> is no prompt; expected <prompt schema="{schema}">')
    named = _attributes(root, ("schema",), "schema")["schema"]
    if named != schema:
        raise root.place.error(f"the prompt is for schema {named!r:.60}; expected schema={schema!r}")
    return tuple(_prompt_nodes(root, strip=True)), root.place


def read_text(path: Path) -> str:
    """Return the text of a file that somebody named.

    Raises
    ------
    PMLError
        If it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PMLError(f"this is not UTF-8 (byte {error.start}); convert it", source=path.name) from None
    except OSError as error:
        raise PMLError(f"{path} cannot be read: {error.strerror}") from error


def _prompt_nodes(element: Element, *, strip: bool = False) -> Iterator[PromptNode]:
    for item in tidy(element, strip=strip):
        if isinstance(item, Text):
            yield item
        elif item.tag in ROLES:
            yield _turn(item)
        else:
            attributes = dict(item.attributes)
            name = item.tag
            if name == "module":
                # A name that is no XML name is imported like this.
                name = _attributes(item, tuple(attributes), "name")["name"]
                del attributes["name"]
            yield Import(name, attributes, tuple(_prompt_nodes(item)), item.place)


def _turn(element: Element) -> Turn:
    _attributes(element, ())
    texts = []
    for item in tidy(element, strip=True):
        if isinstance(item, Element):
            raise item.place.error(
                f"<{item.tag:.60}> stands in the prompt's <{element.tag}>, which holds text only; import modules before it"
            )
        texts.append(item.text)
    return Turn(cast(RoleName, element.tag), "".join(texts), element.place)


def _attributes(element: Element, allowed: tuple[str, ...], *required: str) -> dict[str, str]:
    """The attributes of an element, which has those that are required and none that is unknown."""
    for name in element.attributes:
        if name not in allowed:
            expected = f"expected {', '.join(allowed)}" if allowed else "it has none"
            raise element.place.error(f"<{element.tag}> has no attribute {name!r:.60}; {expected}")
    for name in required:
        if not element.attributes.get(name, "").strip():
            raise element.place.error(f'<{element.tag}> needs {name}="..."')
    return element.attributes


def _length(element: Element) -> int:
    _must_be_empty(element)
    name = element.attributes["name"]
    lengths = [element.attributes[each] for each in ("len", "length") if each in element.attributes]
    if len(lengths) != 1:
        how = "has both len and length; keep one of them" if lengths else 'needs len="..."'
        raise element.place.error(f"<{element.tag}> {how}, the most tokens that an argument for {name!r:.60} may have")
    number = _NUMBER.fullmatch(lengths[0])
    if number is None:
        raise element.place.error(
            f'<{element.tag}> has len="{lengths[0]:.40}"; give a whole number of tokens from 1 to {MAX_PARAM_LENGTH}'
        )
    return int(number[1])


def _is_empty(element: Element) -> bool:
    return not any(isinstance(child, Element) or child.text.strip() for child in element.children)


def _must_be_empty(element: Element) -> None:
    if not _is_empty(element):
        raise element.place.error(f"<{element.tag}> holds something; expected <{element.tag} .../>")


def _ends_line(nodes: Sequence[Node]) -> bool:
    """Whether nodes end with a line break, or with nothing to which one could be added."""
    if not nodes:
        return True
    last = nodes[-1]
    if isinstance(last, Text):
        return last.text.endswith("\n")
    if isinstance(last, Union):
        return all(_ends_line([member]) for member in last.children)
    return not isinstance(last, Param) and _ends_line(last.children)


def _read_bytes(path: Path) -> bytes:
    # Not blocking, so that a pipe that nobody writes to is found out instead of waited for.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is no ordinary file")
        if state.st_size > _MAX_FILE_BYTES:
            raise OSError(f"it has {state.st_size} bytes, more than {_MAX_FILE_BYTES}")
        return file.read(_MAX_FILE_BYTES)


def schema_beside(prompt: Path) -> Path:
    """Return the file beside a prompt that has the name of its schema.

    Raises
    ------
    PMLError
        If the prompt cannot be read, or there is no such file.
    """
    root = parse(read_text(prompt), prompt.name)
    name = root.attributes.get("schema", "")
    endings = dict.fromkeys((prompt.suffix, ".pml", ".xml"))
    # A name is no path: what a prompt says must not lead out of its folder.
    beside = [prompt.with_name(f"{name}{ending}") for ending in endings] if name and name == Path(name).name else []
    found = next((path for path in beside if path != prompt and path.is_file()), None)
    if found is None:
        raise root.place.error(
            f"beside the prompt there is no file {' or '.join(path.name for path in beside) or 'of its schema'}; name the "
            "schema's file with --schema FILE"
        )
    return found
