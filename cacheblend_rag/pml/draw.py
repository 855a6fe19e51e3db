"""A layout as a picture: positions to the right, a line for each module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from cacheblend_rag.pml.rows import LayoutRow

__all__ = ["draw_layout"]

_LINE = 22
_LABELS = 250
_BARS = 700
_HEAD = 58
_MARGIN = 16
_CHARACTERS = 34
_COLOURS = {"cached": "#1f77b4", "slot": "#ff7f0e", "new": "#2ca02c", "extent": "#d9e4ee"}
_LEGEND = (("cached", "KV is kept"), ("slot", "parameter"), ("extent", "nested, or not used"), ("new", "computed"))


def draw_layout(title: str, rows: Sequence[LayoutRow]) -> str:
    """Draw rows as SVG.

    Parameters
    ----------
    title : str
        What stands above.
    rows : sequence of LayoutRow
        Of a schema, or of a prompt.

    Returns
    -------
    str
        An SVG document.
    """
    end = max((row.stop for row in rows), default=1)
    height = _HEAD + _LINE * len(rows) + 2 * _MARGIN
    width = _LABELS + _BARS + 3 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend(),
        *_axis(end, len(rows)),
    ]
    for number, row in enumerate(rows):
        parts += _bar(row, _HEAD + _LINE * number, end)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _bar(row: LayoutRow, top: int, end: int) -> Iterable[str]:
    label = row.name if len(row.name) <= _CHARACTERS else f"{row.name[: _CHARACTERS - 1]}…"
    style = ' font-style="italic"' if row.kind not in ("module", "member") else ""
    tokens = row.stop - row.start
    yield f"<g><title>{escape(f'{row.name}: {row.kind}, positions {row.start} to {row.stop - 1}, {tokens} tokens')}</title>"
    yield f'<text x="{_MARGIN + 12 * row.depth}" y="{top + 15}"{style}>{escape(label)}</text>'
    computed = row.kind in ("new text", "argument", "BOS")
    yield _rect(row.start, row.stop, top, end, "new" if computed else "extent")
    for extent in row.cached:
        yield _rect(extent.start, extent.stop, top, end, "cached")
    for extent in row.slots:
        yield _rect(extent.start, extent.stop, top, end, "slot")
    yield "</g>"


def _rect(start: int, stop: int, top: int, end: int, kind: str) -> str:
    width = max(_x(stop, end) - _x(start, end), 0.5)
    place = f'x="{_x(start, end):.1f}" y="{top + 3}" width="{width:.1f}" height="{_LINE - 6}"'
    return f"<rect {place} fill={quoteattr(_COLOURS[kind])}/>"


def _axis(end: int, lines: int) -> Iterable[str]:
    step = next(each for power in range(12) for each in (10**power, 2 * 10**power, 5 * 10**power) if end / each <= 8)
    for position in range(0, end + 1, step):
        x = _x(position, end)
        ends = f'x1="{x:.1f}" y1="{_HEAD - 4}" x2="{x:.1f}" y2="{_HEAD + _LINE * lines}"'
        yield f'<line {ends} stroke="#cccccc" stroke-width="0.5"/>'
        yield f'<text x="{x:.1f}" y="{_HEAD - 8}" font-size="10" text-anchor="middle">{position}</text>'


def _legend() -> Iterable[str]:
    for number, (kind, meaning) in enumerate(_LEGEND):
        x = _LABELS + _MARGIN + 150 * number
        yield f'<rect x="{x}" y="13" width="12" height="12" fill={quoteattr(_COLOURS[kind])}/>'
        yield f'<text x="{x + 17}" y="23" font-size="11">{escape(meaning)}</text>'


def _x(position: int, end: int) -> float:
    return _LABELS + _MARGIN + _BARS * position / end
