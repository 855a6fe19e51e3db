"""White space: what of it is text, and what is only there to make a document readable."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from cacheblend_rag.pml.parse import Element, Item, RawText

__all__ = ["ends_its_line", "tidy"]

_LEADING = re.compile(r"\A\s*\n")
_INDENTATION = re.compile(r"\n[ \t]*\Z")
_TRAILING = re.compile(r"\n\s*\Z")
_REST_OF_LINE = re.compile(r"[ \t]*\n")


def tidy(element: Element, inline: Collection[str], *, strip: bool = False) -> list[Item]:
    """Return the children of an element with indentation and the line breaks around tags taken out of the text.

    The indentation that all lines of the element have in common goes, so that code keeps its own. So do the line break behind a
    start tag or behind a nested element, white space between two nested elements, and the indentation before a tag. What stands
    around `inline` elements stays, as they are parts of a sentence. With ``xml:space="preserve"`` everything stays.

    Parameters
    ----------
    element : Element
        The element.
    inline : collection of str
        Tags of elements that stand in the text like words.
    strip : bool
        Whether white space at the element's own start and end goes as well, as chat templates do it.

    Returns
    -------
    list of (Element or RawText)
        The children; texts that became empty are left out.
    """
    if element.keeps_space:
        return list(element.children)
    margin = _margin(element.children)
    tidied: list[Item] = []
    last = len(element.children) - 1
    for number, child in enumerate(element.children):
        if isinstance(child, Element):
            tidied.append(child)
            continue
        before = element.children[number - 1] if number else None
        after = element.children[number + 1] if number < last else None
        is_inline = [isinstance(each, Element) and each.tag in inline for each in (before, after)]
        text = child.text
        if not text.strip() and not any(is_inline):
            continue
        text = _without_margin(text, margin)
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
    follows = parent.children[place + 1 : place + 2]
    return bool(follows) and isinstance(follows[0], RawText) and _REST_OF_LINE.match(follows[0].text) is not None


def _margin(children: Sequence[Item]) -> str:
    """The indentation that all lines have in common, those that begin with a tag included."""
    found = []
    for number, child in enumerate(children):
        if isinstance(child, Element):
            continue
        lines = child.text.split("\n")
        for place, line in enumerate(lines[1:], 1):
            blank = not line.strip()
            if not blank or (place == len(lines) - 1 and number < len(children) - 1):
                found.append(line[: len(line) - len(line.lstrip(" \t"))])
    margin = found[0] if found else ""
    for each in found:
        while not each.startswith(margin):
            margin = margin[:-1]
    return margin


def _without_margin(text: str, margin: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(line.removeprefix(margin) if line.strip() else line[len(margin) :] for line in rest)])
