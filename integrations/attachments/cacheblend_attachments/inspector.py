"""Inspector's page: what became of every token of a prompt, and where the time went.

It is one file without a script, made from the template `inspector.html`. Texts of prompts and answers are hostile input: Jinja
escapes them, and the page's policy allows its own style, by its digest, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import BlendReport, CallReport, Trace, TracedChunk
from cacheblend_rag.stops import Spelling
from cacheblend_rag.store import NodeRecord

__all__ = ["InspectorPage", "inspector_page", "page_of"]

_FRAME_HEIGHT = 760
_FATES = {
    "computed": "computed",
    "recomputed": "recomputed over its stored KV",
    "encoded": "not stored: encoded first, and kept",
    "ram": "KV from RAM",
    "disk": "KV from disk",
    "head": "fixed head, KV stored",
    "prefix": "KV from an earlier prompt",
}
_WAITS = {"queue": "waiting for the model", "open": "opening stored KV", "encode": "encoding misses"}


class InspectorPage(str):
    """An HTML document that shows itself in a notebook."""

    def __repr__(self) -> str:
        return f"<inspector's page of {len(self)} characters>"

    def _repr_html_(self) -> str:
        # In a frame the page's own policy holds, and the notebook's styles do not.
        return (
            f'<iframe srcdoc="{html.escape(self, quote=True)}" sandbox="" title="cacheblend-rag inspector" '
            f'width="100%" height="{_FRAME_HEIGHT}" style="border: 0; color-scheme: light dark"></iframe>'
        )


class _Token(NamedTuple):
    row: int
    text: str
    fate: str


class _Bar(NamedTuple):
    """A stretch of time, in seconds after the call; what is loaded is drawn above what is computed meanwhile."""

    what: str
    start: float
    stop: float
    kind: str
    place: str = "whole"


def inspector_page(
    engine: ChunkLibrary, report: BlendReport | CallReport, full: BlendReport | CallReport | None = None
) -> InspectorPage:
    """Return a page that shows what became of every token of a prompt, and where the time went.

    The page is complete in itself, and nothing in it is loaded from elsewhere. It holds the texts of the prompt and the answer;
    of other chunks only ids. Make it while the engine is open: the store says which chunks a chunk's KV has seen.

    Parameters
    ----------
    engine : BlendEngine
        The engine that answered.
    report : BlendReport or CallReport
        An answer's report, as the engine returned it or as a framework has it; of several calls the page is the last one's.
    full : BlendReport or CallReport, optional
        The report of the same prompt's full prefill, which the page then shows beside this one.

    Returns
    -------
    InspectorPage
        An HTML document, which a notebook shows where a cell ends with it.

    Raises
    ------
    ConfigError
        If the answer is not finished, its report was read from a file, copied or made by a server, or `full` is of another
        prompt.
    """
    reports = [_report_of(each) for each in (report, full) if each is not None]
    traces = [_trace_of(each) for each in reports]
    if len({trace.token_ids for trace in traces}) > 1:
        raise ConfigError("full is the report of another prompt; give that of the same prompt with blending disabled")
    contexts = [_contexts(engine, trace.chunks) for trace in traces]
    return page_of(engine.tokenizer, list(zip(map(BlendReport.to_dict, reports), traces, contexts, strict=True)))


def _report_of(report: BlendReport | CallReport) -> BlendReport:
    found = getattr(report, "last", None) if isinstance(report, dict) else report
    if found is None:
        raise ConfigError("there is no page: the answer is not finished, or its report was read from a file")
    return found


def _trace_of(report: BlendReport) -> Trace:
    if report.trace is None:
        raise ConfigError(
            "this report was copied or read from a file, but a page needs data that only the answering process has; "
            "give the report that the engine returned"
        )
    return report.trace


def page_of(
    tokenizer: Any, answers: Sequence[tuple[Mapping[str, Any], Trace, Sequence[dict[str, Any]]]]
) -> InspectorPage:
    """Return the page of an answer, with a switch to another one to the same prompt if that is given.

    Each has its report as a dictionary, its trace, and each chunk's document and what its KV has seen.
    """
    traces = [trace for _, trace, _ in answers]
    tokens = _texts(tokenizer, traces[0].token_ids)
    style = _environment().get_template("inspector.css").render()
    page = (
        _environment()
        .get_template("inspector.html")
        .render(
            style=style,
            digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii"),
            question="".join(tokens[max((chunk.stop for chunk in traces[0].chunks), default=0) :]).strip(),
            differs=_first_difference([trace.output_ids for trace in traces]),
            views=[
                _view(report, trace, contexts, tokens) | {"answer": _texts(tokenizer, trace.output_ids)}
                for report, trace, contexts in answers
            ],
        )
    )
    # A lone surrogate could not be written.
    return InspectorPage(page.encode("utf-8", "replace").decode("utf-8"))


@cache
def _environment() -> Environment:
    loader = PackageLoader("cacheblend_attachments", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"seconds": say_seconds, "bytes": say_bytes, "fate": _say_fate}
    return environment


def _say_fate(fate: str) -> str:
    return _FATES.get(fate, f"KV from {fate}")


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character of several tokens is the last one's."""
    shown = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    spelling = Spelling(lambda ids: tokenizer.decode(ids, **shown))
    texts = [spelling.add(each) for each in token_ids]
    return [*texts[:-1], texts[-1] + spelling.rest()] if texts else []


def _contexts(engine: ChunkLibrary, chunks: Sequence[TracedChunk]) -> list[dict[str, Any]]:
    """Return each chunk's document, and the ids of the chunks that its KV has seen, as far as the store still knows."""
    ids = list(dict.fromkeys(chunk.id for chunk in chunks if chunk.id is not None))
    records: dict[str | None, NodeRecord | None] = {}
    # An engine that is closed, or a store that cannot be read now, is no reason to show nothing.
    with suppress(CacheBlendError):
        records |= zip(ids, engine.records(ids), strict=True)
    return [_context(chunk, records.get(chunk.id)) for chunk in chunks]


def _context(chunk: TracedChunk, record: NodeRecord | None) -> dict[str, Any]:
    if record is None or chunk.key not in record.keys:
        # Of a name that leads elsewhere by now nothing is said: it is another chunk, or one behind others.
        return {"document": None, "seen": None if chunk.behind else []}
    later = record.later
    seen = later.seen if later is not None and later.key == chunk.key else ()
    return {"document": record.document, "seen": [id for id, _ in seen]}


def _first_difference(answers: Sequence[tuple[int, ...]]) -> int | None:
    """Return which token is the first in which two answers differ; None where they do not, or there is one."""
    if len(answers) < 2 or answers[0] == answers[1]:
        return None
    first, second = answers
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(map(len, answers))
    )


def _view(
    report: Mapping[str, Any], trace: Trace, contexts: Sequence[dict[str, Any]], texts: Sequence[str]
) -> dict[str, Any]:
    """Return what the page shows of one answer, but for its text."""
    tokens = [_Token(row, *each) for row, each in enumerate(zip(texts, _fates(trace), strict=True))]
    counts, row = Counter(token.fate for token in tokens), 0
    parts: list[tuple[dict[str, Any] | None, list[_Token]]] = []
    for chunk, context in zip(trace.chunks, contexts, strict=True):
        own = tokens[chunk.start : chunk.stop]
        parts.append((None, tokens[row : chunk.start]))
        parts.append((chunk._asdict() | context | {"fates": Counter(token.fate for token in own)}, own))
        row = chunk.stop
    parts.append((None, tokens[row:]))
    return {
        "report": report,
        "full": report["selector"] == "full",
        "legend": [(fate, counts[fate]) for fate in (*_FATES, *(counts.keys() - _FATES.keys())) if counts[fate]],
        "known": _FATES,
        "parts": [part for part in parts if part[1]],
        "skipped": [each["id"] for each in report["chunks"] if not each["tokens"]],
        "lanes": list(_lanes(trace)),
        "end": max(trace.forward_ended, *trace.token_times[:1]) - trace.started or 1e-9,
        "gaps": [after - before for before, after in zip(trace.token_times, trace.token_times[1:], strict=False)],
    }


def _fates(trace: Trace) -> list[str]:
    """Return what became of each token of the prompt."""
    fates = ["computed"] * len(trace.token_ids)
    for span in trace.reused:
        rows = slice(int(span.start), int(span.stop))
        fates[rows] = [span.what] * len(fates[rows])
    for row in trace.recomputed:
        fates[row] = "recomputed"
    return fates


def _lanes(trace: Trace) -> Iterator[tuple[str, list[_Bar]]]:
    """Yield what the time until the first token was spent on, line by line."""

    def bar(what: str, start: float, stop: float, *kind: str) -> _Bar:
        return _Bar(what, start - trace.started, stop - trace.started, *kind)

    began, ended = trace.forward_started, trace.forward_ended
    first = min([wait.start for wait in trace.waits], default=began)
    yield "Look-up", [bar("tokenising the prompt and looking up its ids", trace.started, first, "other")]
    for wait in trace.waits:
        kind = {"queue": "wait", "open": "load"}.get(wait.what, "work")
        yield wait.what.capitalize(), [bar(_WAITS[wait.what], wait.start, wait.stop, kind)]
    times = trace.layers
    if times is None or not times.asked:
        yield "All layers", [bar("prefill of all layers", began, ended, "work")]
        return
    layers = sorted(times.asked)
    yield f"To layer {layers[0]}", [bar("before the first loaded layer", began, times.asked[layers[0]], "work")]
    for layer, until in zip(layers, [*(times.asked[layer] for layer in layers[1:]), ended], strict=True):
        bars = [
            bar(f"waiting for layer {layer}", times.asked[layer], times.handed[layer], "wait", "lower"),
            bar(f"computing layer {layer}", times.handed[layer], until, "work", "lower"),
        ]
        if layer in times.load_ended:
            loaded = times.load_began[layer], times.load_ended[layer]
            bars.append(bar(f"loading layer {layer}", *loaded, "load", "upper"))
        yield f"Layer {layer}", bars
