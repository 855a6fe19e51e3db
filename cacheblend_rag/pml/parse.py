"""From XML to elements that know their place."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from io import BytesIO
from typing import TypeAlias
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl, InputSource, Locator

from defusedxml import DefusedXmlException
from defusedxml.sax import make_parser

from cacheblend_rag.errors import PMLError
from cacheblend_rag.pml.nodes import MAX_DEPTH, Place

__all__ = ["Element", "RawText", "parse"]

_TAG = re.compile(r"""<(?:[^>"']|"[^"]*"|'[^']*')*>""")
_PRESERVE = "xml:space"


@dataclass(frozen=True, slots=True)
class RawText:
    """Text between two tags, white space included."""

    text: str
    place: Place


@dataclass(slots=True)
class Element:
    """A tag, its attributes and what stands in it.

    Attributes
    ----------
    tag : str
        Its name.
    attributes : dict of str to str
        Its attributes, without ``xml:space``.
    place : Place
        Where its start tag begins.
    keeps_space : bool
        Whether ``xml:space="preserve"`` holds in it.
    children : list of (Element or RawText)
        What stands in it; no two texts follow each other.
    """

    tag: str
    attributes: dict[str, str]
    place: Place
    keeps_space: bool = False
    children: list[Item] = field(default_factory=list)


Item: TypeAlias = "Element | RawText"


def parse(text: str, source: str | None = None) -> Element:
    """Read a document.

    Parameters
    ----------
    text : str
        The document. It has no DTD: entities other than those of XML itself cannot be declared.
    source : str, optional
        Its file, for messages.

    Returns
    -------
    Element
        Its root.

    Raises
    ------
    PMLError
        If it is not well-formed, has a DTD, or is nested deeper than `MAX_DEPTH`; the message says where.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    reader = _Reader(text, source)
    parser = make_parser()
    parser.forbid_dtd = True
    parser.setContentHandler(reader)
    document = InputSource(source)
    # Whatever encoding the document claims to have: it is text already.
    document.setEncoding("utf-8")
    try:
        document.setByteStream(BytesIO(text.encode("utf-8")))
        parser.parse(document)
    except UnicodeEncodeError as error:
        raise reader.place_of(error.start).error(
            f"{text[error.start]!r} is half of a character; write the whole character"
        ) from None
    except SAXParseException as error:
        raise reader.explain(error) from None
    except DefusedXmlException:
        raise reader.here().error(
            "a document type declaration (<!DOCTYPE ...>) is not allowed, so that no entity can expand; leave it out"
        ) from None
    assert reader.root is not None
    return reader.root


class _Reader(ContentHandler):
    """Builds elements from the parser's events."""

    def __init__(self, text: str, source: str | None) -> None:
        super().__init__()
        self.root: Element | None = None
        self._text = text
        self._source = source
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._open: list[Element] = []
        self._pending: list[str] = []
        self._tag_end = 0
        self._locator: Locator | None = None

    def setDocumentLocator(self, locator: Locator) -> None:
        self._locator = locator

    def startElement(self, name: str, attrs: AttributesImpl) -> None:
        self._flush()
        place = self.here()
        if len(self._open) >= MAX_DEPTH:
            raise place.error(
                f"<{name:.60}> is nested {MAX_DEPTH + 1} deep; at most {MAX_DEPTH} elements stand in each other"
            )
        attributes = dict(attrs.items())
        space = attributes.pop(_PRESERVE, None)
        if space not in (None, "preserve", "default"):
            raise place.error(f'{_PRESERVE}="{space:.40}" means nothing; write {_PRESERVE}="preserve", or leave it out')
        inherited = bool(self._open) and self._open[-1].keeps_space
        element = Element(name, attributes, place, inherited if space is None else space == "preserve")
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._tag_end = self._end_of_tag()

    def endElement(self, name: str) -> None:
        self._flush()
        self._open.pop()
        self._tag_end = self._end_of_tag()

    def characters(self, content: str) -> None:
        self._pending.append(content)

    def here(self) -> Place:
        """The place of the event that is being handled."""
        if self._locator is None:
            return Place(self._source, 1, 1)
        line, column = self._locator.getLineNumber(), self._locator.getColumnNumber()
        return Place(self._source, line or 1, (column or 0) + 1)

    def place_of(self, offset: int) -> Place:
        """The place of a character."""
        line = bisect_right(self._lines, offset)
        return Place(self._source, line, offset - self._lines[line - 1] + 1)

    def explain(self, error: SAXParseException) -> PMLError:
        """Say what the parser expected."""
        place = Place(self._source, error.getLineNumber() or 1, (error.getColumnNumber() or 0) + 1)
        what = error.getMessage()
        last = self._open[-1] if self._open else None
        if "mismatched tag" in what and last is not None:
            return place.error(f"expected </{last.tag:.60}>, which closes the element at {last.place}")
        if last is not None and ("no element found" in what or "unclosed" in what):
            return place.error(
                f"the document ends where </{last.tag:.60}> was expected, for the element at {last.place}"
            )
        if "no element found" in what:
            return place.error('the document is empty; expected <schema name="..."> or <prompt schema="...">')
        if "invalid token" in what:
            return place.error(
                "this is no XML; write &lt; for < and &amp; for &, or put the text into <![CDATA[ ... ]]>"
            )
        if "junk after document element" in what:
            return place.error("something stands behind the end of the document; one element holds everything")
        if "undefined entity" in what:
            return place.error("unknown entity; expected one of &lt; &gt; &amp; &quot; &apos;, or the character itself")
        return place.error(f"this is no well-formed XML: {what}")

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if text and self._open:
            start = self._tag_end
            while start < len(self._text) and self._text[start].isspace():
                start += 1
            self._open[-1].children.append(RawText(text, self.place_of(start)))

    def _end_of_tag(self) -> int:
        place = self.here()
        assert place.line is not None and place.column is not None
        start = self._lines[min(place.line, len(self._lines)) - 1] + place.column - 1
        tag = _TAG.match(self._text, start)
        return tag.end() if tag else start
