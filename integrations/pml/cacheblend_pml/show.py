"""A layout for people: as rows, one for each module and anonymous text, and as a picture with positions to the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from cacheblend_pml.layout import LaidOutPrompt, SchemaLayout, Span

__all__ = ["LayoutRow", "draw_layout", "layout_rows", "segment_rows"]

# Characters of an anonymous text that stand for it.
_SHOWN = 40
# Of the picture, in pixels, but for the characters of a label.
_LINE, _LABELS, _BARS, _HEAD, _MARGIN, _CHARACTERS = 22, 250, 700, 58, 16, 34
_CACHED, _SLOT, _NEW, _EXTENT = "#1f77b4", "#ff7f0e", "#2ca02c", "#d9e4ee"
_LEGEND = {_CACHED: "KV is kept", _SLOT: "parameter", _EXTENT: "nested, or not used", _NEW: "computed"}


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One module, anonymous text or segment of a prompt, all in positions.

    `kind` is "text", "module", "member" (of a union), "argument", "new text" or "BOS". The `extent` includes what is nested
    in it; `cached` are its own texts, whose KV is kept, `slots` its parameters, or the argument that it is. `scaffold` names
    the one that it is encoded with, if it is in one.
    """

    name: str
    kind: str
    extent: range
    cached: tuple[range, ...] = ()
    slots: tuple[range, ...] = ()
    depth: int = 0
    scaffold: str = ""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens with KV of their own that is kept; a parameter's fillers count, for they are encoded too."""
        filled = self.slots if self.kind in ("module", "member") else ()
        return sum(map(len, (*self.cached, *filled)))


def layout_rows(layout: SchemaLayout) -> list[LayoutRow]:
    """Return the rows of a schema in reading order; a module stands before what is nested in it."""
    scaffolds = {number: part.name for number, part in layout.parts_of(layout.spans).items() if part.is_scaffold}
    members = {name for union in layout.schema.unions for name in union}
    rows = []
    for each in layout.reading_order:
        depth = 0
        if isinstance(each, Span):
            words = " ".join(each.text.split())
            name, kind = words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…", "text"
            extent, spans = each.extent, [each]
        else:
            name, kind = each, "member" if each in members else "module"
            extent, spans = layout.extents[each], [span for span in layout.spans if span.module == each]
            above = layout.schema.parents[each]
            while above is not None:
                depth, above = depth + 1, layout.schema.parents[above]
        cached = tuple(span.extent for span in spans if span.param is None)
        slots = tuple(span.extent for span in spans if span.param is not None)
        scaffold = next((scaffolds[span.part] for span in spans if span.part in scaffolds), "")
        rows.append(LayoutRow(name, kind, extent, cached, slots, depth, scaffold))
    return rows


def segment_rows(layout: SchemaLayout, prompt: LaidOutPrompt) -> list[LayoutRow]:
    """Return the rows of a prompt, one for each segment, in order of position."""
    rows = []
    for segment in prompt.segments:
        extent = segment.extent
        if segment.param is not None:
            rows.append(LayoutRow(f"{segment.module} {segment.param.name}", "argument", extent, slots=(extent,)))
        elif segment.part is not None:
            kind = "text" if segment.module is None else "module"
            rows.append(LayoutRow(segment.module or prompt.parts[segment.part].name, kind, extent, (extent,)))
        else:
            kind = "BOS" if segment.stop <= len(layout.tokens.bos_ids) else "new text"
            rows.append(LayoutRow(kind, kind, extent))
    return rows


def draw_layout(title: str, rows: Sequence[LayoutRow]) -> str:
    """Draw the rows of a schema or of a prompt as SVG."""
    end = max((row.extent.stop for row in rows), default=1)
    height = _HEAD + _LINE * len(rows) + 2 * _MARGIN
    width = _LABELS + _BARS + 3 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (colour, meaning) in enumerate(_LEGEND.items()):
        left = _LABELS + _MARGIN + 150 * number
        parts.append(f'<rect x="{left}" y="13" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="23" font-size="11">{meaning}</text>')
    step = next(each for power in range(12) for each in (10**power, 2 * 10**power, 5 * 10**power) if end / each <= 8)
    for position in range(0, end + 1, step):
        x = _x(position, end)
        ends = f'x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{_HEAD + _LINE * len(rows)}"'
        parts.append(f'<line {ends} stroke="#cccccc" stroke-width="0.5"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEAD - 8}" font-size="10" text-anchor="middle">{position}</text>')
    for number, row in enumerate(rows):
        parts += _bar(row, _HEAD + _LINE * number, end)
    return "\n".join([*parts, "</svg>\n"])


def _bar(row: LayoutRow, top: int, end: int) -> Iterator[str]:
    first, last = row.extent.start, row.extent.stop - 1
    label = row.name if len(row.name) <= _CHARACTERS else f"{row.name[: _CHARACTERS - 1]}…"
    style = ' font-style="italic"' if row.kind not in ("module", "member") else ""
    said = f"{row.name}: {row.kind}, positions {first} to {last}, {len(row.extent)} tokens"
    yield f"<g><title>{escape(said)}</title>"
    yield f'<text x="{_MARGIN + 12 * row.depth}" y="{top + 15}"{style}>{escape(label)}</text>'
    whole = _NEW if row.kind in ("new text", "argument", "BOS") else _EXTENT
    bars = [(row.extent, whole), *((each, _CACHED) for each in row.cached), *((each, _SLOT) for each in row.slots)]
    for extent, colour in bars:
        x = _x(extent.start, end)
        place = f'x="{x:.1f}" y="{top + 3}" width="{max(_x(extent.stop, end) - x, 0.5):.1f}" height="{_LINE - 6}"'
        yield f'<rect {place} fill="{colour}"/>'
    yield "</g>"


def _x(position: int, end: int) -> float:
    return _LABELS + _MARGIN + _BARS * position / end
