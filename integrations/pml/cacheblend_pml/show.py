"""A layout for people: a row for each module, anonymous text, or segment of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_pml.layout import LaidOutPrompt, SchemaLayout, Span

__all__ = ["LayoutRow", "layout_rows", "segment_rows"]

# Characters of an anonymous text that stand for it.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One module, anonymous text or segment of a prompt, in positions.

    `kind` is "text", "module", "member" (of a union), "argument", "new text" or "BOS". The `extent` includes what is nested
    in it; `cached_tokens` are its own with KV that is kept, fillers of its parameters, the `slots`, included. `scaffold` names
    the one that it is encoded with, if it is in one.
    """

    name: str
    kind: str
    extent: range
    cached_tokens: int = 0
    slots: Sequence[range] = ()
    depth: int = 0
    scaffold: str = ""


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
        slots = [span.extent for span in spans if span.param is not None]
        scaffold = next((scaffolds[span.part] for span in spans if span.part in scaffolds), "")
        rows.append(LayoutRow(name, kind, extent, sum(map(len, spans)), slots, depth, scaffold))
    return rows


def segment_rows(layout: SchemaLayout, prompt: LaidOutPrompt) -> list[LayoutRow]:
    """Return the rows of a prompt, one for each segment, in order of position."""
    rows = []
    for segment in prompt.segments:
        extent = segment.extent
        if segment.param is not None:
            rows.append(LayoutRow(f"{segment.module} {segment.param.name}", "argument", extent, slots=[extent]))
        elif segment.part is not None:
            kind = "text" if segment.module is None else "module"
            rows.append(LayoutRow(segment.module or prompt.parts[segment.part].name, kind, extent, len(extent)))
        else:
            kind = "BOS" if segment.stop <= len(layout.tokens.bos_ids) else "new text"
            rows.append(LayoutRow(kind, kind, extent))
    return rows
