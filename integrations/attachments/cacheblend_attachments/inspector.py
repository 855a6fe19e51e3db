"""Inspector's page: what became of every token of a prompt, and where the time went.

It is made of `inspector.html`, its style, its script and the data of one or two answers.

Texts of prompts and answers are hostile input. They stand in the page as JSON in which no ``<`` is left, and its script puts
them into the document as text. The page's policy allows this script and this style, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import BlendReport, CallReport
from cacheblend_rag.stops import Spelling
from cacheblend_rag.store import NamedTarget
from cacheblend_rag.trace import Trace, TracedChunk

__all__ = ["InspectorPage", "inspector_page", "page_of"]

_FRAME_HEIGHT = 760
# Figures of the report that the page shows or explains; chunks are shown as the trace has them.
_FIGURES = (
    "ttft_s queue_s overhead_s load_s encode_s recompute_s tpot_s prompt_tokens context_tokens recomputed_tokens "
    "recompute_ratio charged_ratio hits misses selector fallback_reason output_tokens load_bytes kv_bytes "
    "head_tokens prefix_tokens repaired_tokens evicted_tokens batch_size"
).split()


class InspectorPage(str):
    """An HTML document that shows itself in a notebook."""

    def __repr__(self) -> str:
        return f"<inspector's page of {len(self)} characters>"

    def _repr_html_(self) -> str:
        # In a frame the page's own policy holds, and the notebook's styles do not.
        return (
            f'<iframe srcdoc="{html.escape(self, quote=True)}" sandbox="allow-scripts" title="cacheblend-rag inspector" '
            f'width="100%" height="{_FRAME_HEIGHT}" style="border: 0; color-scheme: light dark"></iframe>'
        )


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
    data = {
        "tokens": _texts(tokenizer, traces[0].token_ids),
        "differs": _first_difference([trace.output_ids for trace in traces]),
        "views": [
            _view(report, trace, contexts) | {"answer": _texts(tokenizer, trace.output_ids)}
            for report, trace, contexts in answers
        ],
    }
    style, script = _part("inspector.css"), _part("inspector.js")
    page = Template(_part("inspector.html")).substitute(
        style=style,
        script=script,
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=_escaped(data),
    )
    return InspectorPage(page)


def _texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character of several tokens is the last one's."""
    shown = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    spelling = Spelling(lambda ids: tokenizer.decode(ids, **shown))
    texts = [spelling.add(each) for each in token_ids]
    return [*texts[:-1], texts[-1] + spelling.rest()] if texts else []


def _contexts(engine: ChunkLibrary, chunks: Sequence[TracedChunk]) -> list[dict[str, Any]]:
    """Return each chunk's document, and the ids of the chunks that its KV has seen, as far as the store still knows."""
    ids = list(dict.fromkeys(chunk.id for chunk in chunks if chunk.id is not None))
    targets: dict[str | None, NamedTarget | None] = {}
    # An engine that is closed, or a store that cannot be read now, is no reason to show nothing.
    with suppress(CacheBlendError):
        targets |= zip(ids, engine.targets(ids), strict=True)
    return [_context(chunk, targets.get(chunk.id)) for chunk in chunks]


def _context(chunk: TracedChunk, target: NamedTarget | None) -> dict[str, Any]:
    if target is None or chunk.key not in target.record.keys:
        # Of a name that leads elsewhere by now nothing is said: it is another chunk, or one behind others.
        return {"document": None, "seen": None if chunk.behind else []}
    later = target.record.later
    seen = later.seen if later is not None and later.key == chunk.key else ()
    return {"document": target.document, "seen": [id for id, _ in seen]}


@cache
def _part(name: str) -> str:
    return files("cacheblend_attachments").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _escaped(data: Any) -> str:
    """Return JSON that is ASCII and has nothing in it that ends a script element or begins a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _first_difference(answers: Sequence[tuple[int, ...]]) -> int | None:
    """Return which token is the first in which two answers differ; None where they do not, or there is one."""
    if len(answers) < 2 or answers[0] == answers[1]:
        return None
    first, second = answers
    return next(
        (i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(map(len, answers))
    )


def _view(report: Mapping[str, Any], trace: Trace, contexts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of one answer, but for its text."""
    return {
        "full": report["selector"] == "full",
        "figures": {name: report[name] for name in _FIGURES},
        "fates": [[fate, len(list(rows))] for fate, rows in groupby(_fates(trace))],
        "chunks": [_chunk(chunk) | context for chunk, context in zip(trace.chunks, contexts, strict=True)],
        "skipped": [each["id"] for each in report["chunks"] if not each["tokens"]],
        "waits": [[wait.what, _ms(trace, wait.start), _ms(trace, wait.stop)] for wait in trace.waits],
        "forward": [_ms(trace, trace.forward_started), _ms(trace, trace.forward_ended)],
        "layers": _layers(trace),
        "times": [_ms(trace, moment) for moment in trace.token_times],
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


def _chunk(chunk: TracedChunk) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in ("start", "stop", "id", "behind", "tier", "reason", "attention")}


def _layers(trace: Trace) -> list[list[float | None]]:
    """Return of each layer that was loaded when that began and ended, and when it was asked for and handed over."""
    times = trace.layers
    if times is None:
        return []
    moments = (times.load_began, times.load_ended, times.asked, times.handed)
    return [
        [layer, *(_ms(trace, each[layer]) if layer in each else None for each in moments)]
        for layer in sorted(times.asked)
    ]


def _ms(trace: Trace, moment: float) -> float:
    """Return a moment in milliseconds after the call."""
    return round(1000 * (moment - trace.started), 3)
