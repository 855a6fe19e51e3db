"""Parser from markup to the tree of a schema, and to the nodes of a prompt.

XML is read into elements that know their place (`_parse`), white space that is only there for people is taken out (`_tidy`), and
what is left becomes nodes.
"""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, cast
from xml.parsers import expat

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
    RoleName,
    Scaffold,
    Text,
    Turn,
    Union,
)
from cacheblend_rag.errors import PMLError

__all__ = ["SchemaReader", "parse_prompt", "read_text", "schema_beside"]

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
_PRESERVE = "xml:space"
_LEADING = re.compile(r"\A\s*\n")
_INDENTATION = re.compile(r"\n[ \t]*\Z")
_TRAILING = re.compile(r"\n\s*\Z")
_REST_OF_LINE = re.compile(r"[ \t]*\n")

# What to say of expat's errors, where more can be said than it does.
_EXPECTED = {
    expat.errors.XML_ERROR_NO_ELEMENTS: 'the document is empty; expected <schema name="..."> or <prompt schema="...">',
    expat.errors.XML_ERROR_INVALID_TOKEN: (
        "this is not XML; write &lt; for < and &amp; for &, or put the text into <![CDATA[ ... ]]>"
    ),
    expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT: (
        "something stands after the end of the document; one element holds everything"
    ),
    expat.errors.XML_ERROR_UNDEFINED_ENTITY: (
        "unknown entity; expected one of &lt; &gt; &amp; &quot; &apos;, or the character itself"
    ),
}


class SchemaReader:
    """Reads a schema and the files that it names, which lie below `root`, symbolic links followed; without one, none is read."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = None if root is None else root.resolve()
        self._reading: list[Path] = []
        self._includes = 0

    def read(self, text: str, source: str | None = None, path: Path | None = None) -> tuple[str, tuple[Node, ...]]:
        """Return the name and the children of a schema, which is not yet validated as a whole."""
        root = _parse(text, source)
        if root.tag != "schema":
            hint = "; this is a prompt, and prompts are read for a schema" if root.tag == "prompt" else ""
            raise root.place.error(f'expected <schema name="...">, not <{root.tag:.60}>{hint}')
        name = _attributes(root, ("name",), "name")["name"]
        if path is not None:
            self._reading.append(path.resolve())
        children = tuple(self._children(root))
        if path is not None:
            self._reading.pop()
        return name, children

    def _children(self, element: _Element, *, strip: bool = False) -> Iterator[Node]:
        for item in _tidy(element, _PARAMS, strip=strip):
            if isinstance(item, Text):
                yield item
            elif item.tag == "include":
                yield from self._include(item)
            else:
                yield self._node(item, element)

    def _node(self, element: _Element, parent: _Element) -> Node:
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

    def _module_children(self, element: _Element, parent: _Element) -> tuple[Node, ...]:
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
        if _ends_its_line(element, parent) and not _ends_line(children):
            last = children[-1]
            if isinstance(last, Text):
                children[-1] = Text(last.text + "\n", last.place)
            else:
                children.append(Text("\n", last.place))
        return tuple(children)

    def _include(self, element: _Element) -> tuple[Node, ...]:
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
            state = path.stat()
            # Reading a pipe without a writer would wait for ever.
            if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_FILE_BYTES:
                raise OSError(f"it is not a regular file of at most {_MAX_FILE_BYTES} bytes")
            return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"), path
        except UnicodeDecodeError as error:
            raise place.error(f"{shown} is not UTF-8 (byte {error.start}); convert it") from None
        # A name with half a character, and links in a circle.
        except (OSError, UnicodeEncodeError, RuntimeError) as error:
            raise place.error(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_prompt(text: str, schema: str, source: str | None = None) -> tuple[tuple[PromptNode, ...], Place]:
    """Return the nodes of a prompt for the schema of a name, and where the prompt begins."""
    root = _parse(text, source)
    if root.tag != "prompt":
        raise root.place.error(f'expected <prompt schema="{schema}">, not <{root.tag:.60}>')
    named = _attributes(root, ("schema",), "schema")["schema"]
    if named != schema:
        raise root.place.error(f"the prompt is for schema {named!r:.60}; expected schema={schema!r}")
    return tuple(_prompt_nodes(root, strip=True)), root.place


def read_text(path: Path) -> str:
    """Return the text of a file that a user named; `PMLError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PMLError(f"this is not UTF-8 (byte {error.start}); convert it", source=path.name) from None
    except OSError as error:
        raise PMLError(f"{path} cannot be read: {error.strerror}") from error


def _prompt_nodes(element: _Element, *, strip: bool = False) -> Iterator[PromptNode]:
    for item in _tidy(element, strip=strip):
        if isinstance(item, Text):
            yield item
        elif item.tag in ROLES:
            yield _turn(item)
        else:
            attributes = dict(item.attributes)
            name = item.tag
            if name == "module":
                # A name that XML does not allow is imported like this.
                name = _attributes(item, tuple(attributes), "name")["name"]
                del attributes["name"]
            yield Import(name, attributes, tuple(_prompt_nodes(item)), item.place)


def _turn(element: _Element) -> Turn:
    _attributes(element, ())
    texts = []
    for item in _tidy(element, strip=True):
        if isinstance(item, _Element):
            raise item.place.error(
                f"<{item.tag:.60}> is inside the prompt's <{element.tag}>, which may hold only text; import modules before it"
            )
        texts.append(item.text)
    return Turn(cast(RoleName, element.tag), "".join(texts), element.place)


def _attributes(element: _Element, allowed: tuple[str, ...], *required: str) -> dict[str, str]:
    """The attributes of an element, which has those that are required and none that is unknown."""
    for name in element.attributes:
        if name not in allowed:
            expected = f"expected {', '.join(allowed)}" if allowed else "it has none"
            raise element.place.error(f"<{element.tag}> has no attribute {name!r:.60}; {expected}")
    for name in required:
        if not element.attributes.get(name, "").strip():
            raise element.place.error(f'<{element.tag}> needs {name}="..."')
    return element.attributes


def _length(element: _Element) -> int:
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


def _is_empty(element: _Element) -> bool:
    return not any(isinstance(child, _Element) or child.text.strip() for child in element.children)


def _must_be_empty(element: _Element) -> None:
    if not _is_empty(element):
        raise element.place.error(f"<{element.tag}> holds something; expected <{element.tag} .../>")


def _ends_line(nodes: Sequence[Node]) -> bool:
    """Return whether nodes end with a line break, or with nothing to which one could be added."""
    if not nodes:
        return True
    last = nodes[-1]
    if isinstance(last, Text):
        return last.text.endswith("\n")
    if isinstance(last, Union):
        return all(_ends_line([member]) for member in last.children)
    return not isinstance(last, Param) and _ends_line(last.children)


def schema_beside(prompt: Path) -> Path:
    """Return the file beside a prompt that has the name of its schema; `PMLError` if there is none."""
    root = _parse(read_text(prompt), prompt.name)
    name = root.attributes.get("schema", "")
    endings = dict.fromkeys((prompt.suffix, ".pml", ".xml"))
    # A name is not a path: what a prompt says must not lead out of its folder.
    beside = [prompt.with_name(f"{name}{ending}") for ending in endings] if name and name == Path(name).name else []
    found = next((path for path in beside if path != prompt and path.is_file()), None)
    if found is None:
        raise root.place.error(
            f"next to the prompt there is no file {' or '.join(path.name for path in beside) or 'of its schema'}; name the "
            "schema's file with --schema FILE"
        )
    return found


@dataclass(slots=True)
class _Element:
    """A tag, its attributes without ``xml:space``, and what stands in it; no two texts follow each other.

    The place of a text is that of its first word.
    """

    tag: str
    attributes: dict[str, str]
    place: Place
    keeps_space: bool = False
    children: list[_Item] = field(default_factory=list)


_Item: TypeAlias = _Element | Text


def _parse(text: str, source: str | None = None) -> _Element:
    """Read a document and return its root; `PMLError` if it is not well-formed, has a DTD, or is nested too deep."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return _Parser(source).parse(text)


class _Parser:
    """Builds elements from the events of expat."""

    def __init__(self, source: str | None) -> None:
        # Whatever encoding the document claims to have: it is text already.
        self._expat = expat.ParserCreate("utf-8")
        self._expat.StartDoctypeDeclHandler = self._refuse_doctype
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.CharacterDataHandler = self._characters
        self._source = source
        self._open: list[_Element] = []
        self._pending: list[str] = []
        self._first_word: Place | None = None
        self._root: _Element | None = None

    def parse(self, text: str) -> _Element:
        try:
            self._expat.Parse(text.encode("utf-8"), True)
        except UnicodeEncodeError as error:
            before = text[: error.start]
            place = Place(self._source, before.count("\n") + 1, error.start - before.rfind("\n"))
            raise place.error(f"{text[error.start]!r} is half of a character; write the whole character") from None
        except expat.ExpatError as error:
            raise self._explain(error) from None
        assert self._root is not None
        return self._root

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._flush()
        place = self._here()
        if len(self._open) >= MAX_DEPTH:
            raise place.error(
                f"<{tag:.60}> is nested {MAX_DEPTH + 1} deep; at most {MAX_DEPTH} elements stand in each other"
            )
        space = attributes.pop(_PRESERVE, None)
        if space not in (None, "preserve", "default"):
            raise place.error(f'{_PRESERVE}="{space:.40}" means nothing; write {_PRESERVE}="preserve", or leave it out')
        inherited = bool(self._open) and self._open[-1].keeps_space
        element = _Element(tag, attributes, place, inherited if space is None else space == "preserve")
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, tag: str) -> None:
        self._flush()
        self._open.pop()

    def _characters(self, data: str) -> None:
        if self._first_word is None and not data.isspace():
            self._first_word = self._here(data)
        self._pending.append(data)

    def _flush(self) -> None:
        if self._pending and self._open:
            text = Text("".join(self._pending), self._first_word or self._here())
            self._open[-1].children.append(text)
        self._pending.clear()
        self._first_word = None

    def _refuse_doctype(self, *declared: object) -> None:
        raise self._here().error(
            "a document type declaration (<!DOCTYPE ...>) is not allowed, so that no entity can expand; leave it out"
        )

    def _here(self, data: str = "") -> Place:
        """The place of the event that is being handled, after the white space that its text begins with."""
        indentation = len(data) - len(data.lstrip())
        return Place(self._source, self._expat.CurrentLineNumber, self._expat.CurrentColumnNumber + 1 + indentation)

    def _explain(self, error: expat.ExpatError) -> PMLError:
        """Say what the parser expected."""
        place = Place(self._source, error.lineno, error.offset + 1)
        what = expat.ErrorString(error.code)
        last = self._open[-1] if self._open else None
        if what == expat.errors.XML_ERROR_TAG_MISMATCH and last is not None:
            return place.error(f"expected </{last.tag:.60}>, which closes the element at {last.place}")
        if last is not None and ("no element found" in what or "unclosed" in what):
            return place.error(
                f"the document ends where </{last.tag:.60}> was expected, for the element at {last.place}"
            )
        return place.error(_EXPECTED.get(what, f"this is not well-formed XML: {what}"))


def _tidy(element: _Element, inline: Collection[str] = (), *, strip: bool = False) -> list[_Item]:
    """Return the children of an element with indentation and the line breaks around tags taken out of the text.

    The indentation that all lines of the element have in common goes, so that code keeps its own. So do the line break after a
    start tag or after a nested element, white space between two nested elements, and the indentation before a tag. What stands
    around `inline` elements stays, as they are parts of a sentence. With `strip`, white space at the element's own start and end
    goes as well, as in chat templates. With ``xml:space="preserve"`` everything stays.
    """
    if element.keeps_space:
        return list(element.children)
    margin = _margin(element.children)
    around: list[_Item | None] = [None, *element.children, None]
    tidied: list[_Item] = []
    for before, child, after in zip(around, element.children, around[2:], strict=False):
        if isinstance(child, _Element):
            tidied.append(child)
            continue
        is_inline = [isinstance(each, _Element) and each.tag in inline for each in (before, after)]
        if not child.text.strip() and not any(is_inline):
            continue
        text = _without_margin(child.text, margin)
        if not is_inline[0]:
            text = _LEADING.sub("", text)
        if not is_inline[1]:
            text = (_TRAILING if after is None else _INDENTATION).sub("\n", text)
        if strip and before is None:
            text = text.lstrip()
        if strip and after is None:
            text = text.rstrip()
        if text:
            tidied.append(replace(child, text=text))
    return tidied


def _ends_its_line(element: _Element, parent: _Element) -> bool:
    """Return whether nothing but white space stands between an element's end and the end of the line."""
    if parent.keeps_space:
        return False
    place = next(number for number, child in enumerate(parent.children) if child is element)
    return any(
        isinstance(each, Text) and _REST_OF_LINE.match(each.text) for each in parent.children[place + 1 : place + 2]
    )


def _margin(children: Sequence[_Item]) -> str:
    """The indentation that all lines have in common, those that begin with a tag included."""
    found = []
    for number, child in enumerate(children):
        if isinstance(child, _Element):
            continue
        *lines, last = child.text.split("\n")[1:] or [""]
        found += [line for line in lines if line.strip()]
        if last.strip() or ("\n" in child.text and number < len(children) - 1):
            found.append(last)
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in found]
    margin = margins[0] if margins else ""
    while not all(each.startswith(margin) for each in margins):
        margin = margin[:-1]
    return margin


def _without_margin(text: str, margin: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(line.removeprefix(margin) if line.strip() else line[len(margin) :] for line in rest)])
