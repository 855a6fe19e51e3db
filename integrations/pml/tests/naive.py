"""A naive interpreter of sections 3.2 to 3.4 of the Prompt Cache paper, written from its text, and random schemas for it.

One character is one token. A schema is drawn as a tree of plain tuples, written down as markup for the parser, and interpreted
here without any of the package's code: positions as a dictionary, character by character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from hypothesis import strategies as st

BOS = 1
FILLER = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# ("text", words) | ("param", name, length) | ("module", name, [children]) | ("union", [modules])
Spec = tuple[Any, ...]


def tokenize(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)


def size(node: Spec) -> int:
    """How many positions a node takes: the paper's token sequence size."""
    kind = node[0]
    if kind == "text":
        return len(node[1])
    if kind == "param":
        return int(node[2])
    if kind == "union":
        return max(size(member) for member in node[1])
    return sum(size(child) for child in node[-1])


def starts(children: list[Spec], start: int) -> list[tuple[Spec, int]]:
    """Every node at every depth with its first position: the sizes of all that precedes it, added up."""
    found = []
    for number, node in enumerate(children):
        here = start + sum(size(each) for each in children[:number])
        found.append((node, here))
        if node[0] == "union":
            for member in node[1]:
                found += starts([member], here)
        elif node[0] in ("module", "scaffold"):
            found += starts(node[-1], here)
    return found


def markup(children: list[Spec]) -> str:
    """The children as PML; white space in texts is kept because there is none at their edges."""
    parts = []
    for node in children:
        kind = node[0]
        if kind == "text":
            parts.append(escape(node[1]))
        elif kind == "param":
            parts.append(f"<param name={quoteattr(node[1])} len='{node[2]}'/>")
        elif kind == "module":
            parts.append(f"<module name={quoteattr(node[1])}>{markup(node[2])}</module>")
        else:
            parts.append(f"<{kind}>{markup(node[1])}</{kind}>")
    return "".join(parts)


def schema_markup(children: list[Spec]) -> str:
    return f'<schema name="random">{markup(children)}</schema>'


@dataclass
class Request:
    """What a prompt takes: imports with arguments and inner items, and new text, in the order they are written."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    items: list[Request | str] = field(default_factory=list)

    def markup(self) -> str:
        given = "".join(f" {name}={quoteattr(value)}" for name, value in self.arguments.items())
        return f"<{self.name}{given}>{items_markup(self.items)}</{self.name}>"


def items_markup(items: list[Request | str]) -> str:
    return "".join(escape(item) if isinstance(item, str) else item.markup() for item in items)


class TooLong(Exception):
    def __init__(self, excess: int) -> None:
        super().__init__(excess)
        self.excess = excess


class _Positions:
    """The tokens of a prompt by their positions, each with what it is: cached, an argument, or new text."""

    def __init__(self, children: list[Spec]) -> None:
        self.taken: dict[int, tuple[int, str]] = {0: (BOS, "text")}
        self.reserved: set[int] = set()
        self.whole = {node[1]: (node, at) for node, at in starts(children, 1) if node[0] == "module"}

    def write(self, text: str, at: int, what: str) -> None:
        self.taken |= {place: (ord(character), what) for place, character in enumerate(text, at)}

    def put_cached(self, nodes: list[Spec], at: int, arguments: dict[str, str], wanted: dict[str, Request]) -> None:
        for node in nodes:
            if node[0] == "text":
                self.write(node[1], at, "cached")
            elif node[0] == "param":
                argument = arguments[node[1]]
                if len(argument) > node[2]:
                    raise TooLong(len(argument) - node[2])
                self.write(argument, at, "argument")
                self.reserved.update(range(at, at + node[2]))
            elif node[0] == "scaffold":
                self.put_cached(node[1], at, arguments, wanted)
            else:
                for member in node[1] if node[0] == "union" else [node]:
                    if member[1] in wanted:
                        request = wanted[member[1]]
                        self.put_cached(member[2], at, request.arguments, requests_of(request.items))
            at += size(node)

    def last_position(self, request: Request) -> int:
        """The concluding position of an imported module: behind its own last token and those of what it imports."""
        node, at = self.whole[request.name]
        ends = [at]

        def own(nodes: list[Spec], position: int) -> None:
            for child in nodes:
                if child[0] in ("text", "param"):
                    ends.append(position + size(child))
                elif child[0] == "scaffold":
                    own(child[1], position)
                position += size(child)

        own(node[2], at)
        return max([*ends, *(self.last_position(inner) for inner in request.items if isinstance(inner, Request))])

    def is_free(self, at: int) -> bool:
        return at not in self.taken and at not in self.reserved

    def put_text(self, text: str, behind: int, limit: int | None) -> int:
        at = behind
        while not self.is_free(at):
            at += 1
        free = at
        while free < at + len(text) and self.is_free(free) and (limit is None or free < limit):
            free += 1
        if free - at < len(text):
            raise TooLong(len(text) - (free - at))
        self.write(text, at, "text")
        return at + len(text)

    def put_texts(self, here: list[Request | str], start: int, end: int | None, *, top: bool) -> int:
        behind = furthest = start
        for number, item in enumerate(here):
            later = [each for each in here[number + 1 :] if isinstance(each, Request)]
            if isinstance(item, str):
                if top and not later:
                    continue
                limits = [] if end is None else [end]
                if later and self.whole[later[0].name][1] >= behind:
                    limits.append(self.whole[later[0].name][1])
                behind = self.put_text(item, behind, min(limits) if limits else None)
            else:
                node, at = self.whole[item.name]
                inner = self.put_texts(item.items, at, at + size(node), top=False)
                behind = max(inner, self.last_position(item))
            furthest = max(furthest, behind)
        return furthest


def interpret(children: list[Spec], items: list[Request | str]) -> dict[int, tuple[int, str]]:
    """The tokens of a prompt by their positions, each with what it is."""
    found = _Positions(children)
    found.put_cached(children, 1, {}, requests_of(items))
    found.put_texts(items, 1, None, top=True)
    if items and isinstance(items[-1], str):
        found.write(items[-1], max([*found.taken, *found.reserved]) + 1, "text")
    return found.taken


def requests_of(items: list[Request | str]) -> dict[str, Request]:
    return {item.name: item for item in items if isinstance(item, Request)}


words = st.text(LETTERS, min_size=1, max_size=6)


@st.composite
def schemas(draw: st.DrawFn, scaffolds: bool = True) -> list[Spec]:
    """Random schemas: nested modules, unions, parameters, scaffolds, anonymous texts."""
    counter = iter(range(1000))

    def module(depth: int, scaffold: bool) -> Spec:
        name = f"m{next(counter)}"
        return ("module", name, content(depth + 1, scaffold, name))

    def content(depth: int, scaffold: bool, owner: str | None) -> list[Spec]:
        kinds = ["text", "text"] + (["param"] if owner else [])
        if depth < 4:
            kinds += ["module", "module", "union"] + (["scaffold"] if scaffold else [])
        made: list[Spec] = []
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
            if kind == "text" and (not made or made[-1][0] != "text"):
                made.append(("text", draw(words)))
            elif kind == "param":
                made.append(("param", f"p{next(counter)}", draw(st.integers(1, 6))))
            elif kind == "module":
                made.append(module(depth, scaffold))
            elif kind == "union":
                made.append(("union", [module(depth, scaffold) for _ in range(draw(st.integers(1, 3)))]))
            elif kind == "scaffold":
                made.append(("scaffold", content(depth + 1, False, owner)))
        return made or [("text", draw(words))]

    return content(0, scaffolds, None)


@st.composite
def requests(draw: st.DrawFn, children: list[Spec]) -> list[Request | str]:
    """A random prompt for a schema: one member of a union at most, arguments that often fit, text that often fits."""

    def choose(nodes: list[Spec]) -> list[Spec]:
        modules: list[Spec] = []
        for node in nodes:
            if node[0] == "module" and draw(st.booleans()):
                modules.append(node)
            elif node[0] == "union" and draw(st.booleans()):
                modules.append(draw(st.sampled_from(node[1])))
            elif node[0] == "scaffold":
                modules += choose(node[1])
        return modules

    def params(nodes: list[Spec]) -> list[Spec]:
        own = [node for node in nodes if node[0] == "param"]
        return own + [each for node in nodes if node[0] == "scaffold" for each in params(node[1])]

    def items(nodes: list[Spec], *, top: bool) -> list[Request | str]:
        found: list[Request | str] = []
        chosen = choose(nodes)
        if draw(st.integers(0, 4)) == 0:
            chosen = draw(st.permutations(chosen))
        for node in chosen:
            if draw(st.integers(0, 3)) == 0:
                found.append(draw(st.text(LETTERS.upper(), min_size=1, max_size=4)))
            arguments = {
                name: draw(st.text("0123456789", max_size=length + (draw(st.integers(0, 20)) == 0)))
                for _, name, length in params(node[2])
            }
            found.append(Request(node[1], arguments, items(node[2], top=False)))
        if (top and draw(st.booleans())) or draw(st.integers(0, 5)) == 0:
            found.append(draw(st.text(LETTERS.upper(), min_size=1, max_size=9)))
        return found

    return items(children, top=True)
