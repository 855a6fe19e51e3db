"""A layout as rows, for people: one for each module and anonymous text."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.pml.layout import Extent, Piece, SchemaLayout
from cacheblend_rag.pml.parts import LaidOutPrompt

__all__ = ["LayoutRow", "layout_rows", "segment_rows"]

# Characters of an anonymous text that stand for it.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One module or anonymous text, or one segment of a prompt.

    Attributes
    ----------
    name : str
        What it is called; anonymous texts are called by their first words.
    kind : str
        "text", "module", "member" (of a union), "argument", "new text" or "BOS".
    depth : int
        How many modules it is nested in.
    start, stop : int
        The half-open range of positions that it takes, with all that is nested in it.
    cached : tuple of Extent
        The ranges whose KV is kept: its own texts.
    slots : tuple of Extent
        The ranges of its parameters; of a segment, where it holds an argument.
    scaffold : str
        The name of the scaffold that it is encoded with, if it is in one.
    """

    name: str
    kind: str
    depth: int
    start: int
    stop: int
    cached: tuple[Extent, ...] = ()
    slots: tuple[Extent, ...] = ()
    scaffold: str = ""

    @property
    def cached_tokens(self) -> int:
        """How many tokens have KV of their own that is kept; a parameter's fillers count, for they are encoded too."""
        filled = self.slots if self.kind in ("module", "member") else ()
        return sum(map(len, (*self.cached, *filled)))


def layout_rows(layout: SchemaLayout) -> list[LayoutRow]:
    """Return the rows of a schema in reading order; a module stands before what is nested in it."""
    groups = {number: part.name for number, part in layout.numbered_parts(layout.pieces) if part.is_scaffold}
    members = {name for union in layout.schema.unions for name in union}
    own: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        if piece.module is not None:
            own.setdefault(piece.module, []).append(piece)
    rows = []
    for each in layout.reading_order:
        if isinstance(each, Piece):
            rows.append(_row(_first_words([each]), "text", 0, Extent(each.position, each.stop), [each], groups))
        else:
            kind = "member" if each in members else "module"
            rows.append(_row(each, kind, _depth(layout, each), layout.extents[each], own.get(each, []), groups))
    return rows


def segment_rows(layout: SchemaLayout, prompt: LaidOutPrompt) -> list[LayoutRow]:
    """Return the rows of a prompt, one for each segment, in order of position."""
    rows = []
    for segment in prompt.segments:
        extent = Extent(segment.position, segment.stop)
        name = segment.module or "new text"
        kind = "module" if segment.module else "new text"
        if segment.part is not None and segment.module is None:
            name, kind = prompt.parts[segment.part].name, "text"
        elif segment.parameter is not None:
            name, kind = f"{segment.module} {segment.parameter}", "argument"
        elif segment.stop <= len(layout.tokens.bos_ids):
            name = kind = "BOS"
        served, argument = (extent,) * segment.is_cached, (extent,) * (segment.parameter is not None)
        rows.append(LayoutRow(name, kind, 0, extent.start, extent.stop, served, argument))
    return rows


def _row(name: str, kind: str, depth: int, extent: Extent, pieces: list[Piece], groups: dict[int, str]) -> LayoutRow:
    ranges = [(Extent(piece.position, piece.stop), piece.param is not None) for piece in pieces]
    cached, slots = (tuple(each for each, is_slot in ranges if is_slot == wanted) for wanted in (False, True))
    group = groups.get(pieces[0].part, "") if pieces else ""
    return LayoutRow(name, kind, depth, extent.start, extent.stop, cached, slots, group)


def _first_words(pieces: list[Piece]) -> str:
    words = " ".join("".join(piece.text for piece in pieces).split())
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


def _depth(layout: SchemaLayout, name: str) -> int:
    above = layout.schema.parents[name]
    return 0 if above is None else 1 + _depth(layout, above)
