"""From XML to elements that know their place, with white space that is only there for people taken out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias
from xml.parsers import expat

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import MAX_DEPTH, Place, Text

__all__ = ["Element", "ends_its_line", "parse", "tidy"]

_PRESERVE = "xml:space"
_LEADING = re.compile(r"\A\s*\n")
_INDENTATION = re.compile(r"\n[ \t]*\Z")
_TRAILING = re.compile(r"\n\s*\Z")
_REST_OF_LINE = re.compile(r"[ \t]*\n")

# What to say of expat's errors, where more can be said than it does.
_EXPECTED = {
    expat.errors.XML_ERROR_NO_ELEMENTS: 'the document is empty; expected <schema name="..."> or <prompt schema="...">',
    expat.errors.XML_ERROR_INVALID_TOKEN: (
        "this is no XML; write &lt; for < and &amp; for &, or put the text into <![CDATA[ ... ]]>"
    ),
    expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT: (
        "something stands behind the end of the document; one element holds everything"
    ),
    expat.errors.XML_ERROR_UNDEFINED_ENTITY: (
        "unknown entity; expected one of &lt; &gt; &amp; &quot; &apos;, or the character itself"
    ),
}


@dataclass(slots=True)
class Element:
    """A tag, its attributes without ``xml:space``, and what stands in it; no two texts follow each other.

    The place of a text is that of its first word.
    """

    tag: str
    attributes: dict[str, str]
    place: Place
    keeps_space: bool = False
    children: list[Item] = field(default_factory=list)


Item: TypeAlias = Element | Text


def parse(text: str, source: str | None = None) -> Element:
    """Read a document and return its root.

    Raises
    ------
    PMLError
        If it is not well-formed, has a DTD, or is nested deeper than `MAX_DEPTH`; the message says where.
    """
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
        self._open: list[Element] = []
        self._pending: list[str] = []
        self._first_word: Place | None = None
        self._root: Element | None = None

    def parse(self, text: str) -> Element:
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
        element = Element(tag, attributes, place, inherited if space is None else space == "preserve")
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
        """The place of the event that is being handled, behind the white space that its text begins with."""
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
        return place.error(_EXPECTED.get(what, f"this is no well-formed XML: {what}"))


def tidy(element: Element, inline: Collection[str] = (), *, strip: bool = False) -> list[Item]:
    """Return the children of an element with indentation and the line breaks around tags taken out of the text.

    The indentation that all lines of the element have in common goes, so that code keeps its own. So do the line break behind a
    start tag or behind a nested element, white space between two nested elements, and the indentation before a tag. What stands
    around `inline` elements stays, as they are parts of a sentence. With `strip`, white space at the element's own start and end
    goes as well, as in chat templates. With ``xml:space="preserve"`` everything stays.
    """
    if element.keeps_space:
        return list(element.children)
    margin = _margin(element.children)
    around: list[Item | None] = [None, *element.children, None]
    tidied: list[Item] = []
    for before, child, after in zip(around, element.children, around[2:], strict=False):
        if isinstance(child, Element):
            tidied.append(child)
            continue
        is_inline = [isinstance(each, Element) and each.tag in inline for each in (before, after)]
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


def ends_its_line(element: Element, parent: Element) -> bool:
    """Whether nothing but white space stands between an element's end and the end of the line."""
    if parent.keeps_space:
        return False
    place = next(number for number, child in enumerate(parent.children) if child is element)
    return any(
        isinstance(each, Text) and _REST_OF_LINE.match(each.text) for each in parent.children[place + 1 : place + 2]
    )


def _margin(children: Sequence[Item]) -> str:
    """The indentation that all lines have in common, those that begin with a tag included."""
    found = []
    for number, child in enumerate(children):
        if isinstance(child, Element):
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
