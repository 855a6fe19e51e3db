"""A layout for people: a row for each module, anonymous text, or segment of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_pml.layout import LaidOutPrompt, SchemaLayout, Span

__all__ = ["layout_rows", "segment_rows"]


def layout_rows(layout: SchemaLayout) -> list[dict[str, Any]]:
    """Return the rows of a schema in reading order; a module stands before what is nested in it.

    `start` and `stop` include what is nested; `cached_tokens` are a module's own, with the fillers of its parameters (`slots`).
    """
    members = {name for union in layout.schema.unions for name in union}
    rows = []
    for each in layout.reading_order:
        if isinstance(each, Span):
            rows.append(_row(" ".join(each.text.split()), "text", each.extent, [each]))
        else:
            spans = [span for span in layout.spans if span.module == each]
            rows.append(_row(each, "member" if each in members else "module", layout.extents[each], spans))
            above = layout.schema.parents[each]
            while above is not None:
                rows[-1]["depth"] += 1
                above = layout.schema.parents[above]
    return rows


def segment_rows(layout: SchemaLayout, prompt: LaidOutPrompt) -> list[dict[str, Any]]:
    """Return the rows of a prompt, one for each segment, in order of position."""
    rows = []
    for segment in prompt.segments:
        if segment.param is not None:
            rows.append(_row(f"{segment.module} {segment.param.name}", "argument", segment.extent))
        elif segment.part is not None:
            kind = "text" if segment.module is None else "module"
            rows.append(_row(segment.module or prompt.parts[segment.part].name, kind, segment.extent, [segment]))
        else:
            kind = "BOS" if segment.stop <= len(layout.tokens.bos_ids) else "new text"
            rows.append(_row(kind, kind, segment.extent))
    return rows


def _row(name: str, kind: str, extent: range, cached: Sequence[Span] = ()) -> dict[str, Any]:
    slots = [[span.position, span.stop] for span in cached if span.param is not None]
    row = {"name": name, "kind": kind, "depth": 0, "start": extent.start, "stop": extent.stop}
    return row | {"cached_tokens": sum(map(len, cached)), "slots": slots}
