"""The inspector's page, made of `inspector.html`, its style, its script and the data of one or two answers.

Texts of prompts and answers are hostile input. They stand in the page as JSON in which no ``<`` is left, and its script puts
them into the document as text. The page's policy allows this script and this style, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from cacheblend_rag.trace import ChunkContext, Trace

__all__ = ["framed", "inspector_page"]

_FRAME_HEIGHT = 760
# Figures of the report that the page shows or explains; chunks are shown as the trace has them.
_FIGURES = (
    "ttft_s queue_s overhead_s load_s encode_s recompute_s tpot_s prompt_tokens context_tokens recomputed_tokens "
    "recompute_ratio charged_ratio hits misses selector fallback_reason guard output_tokens load_bytes kv_bytes "
    "head_tokens conversation_tokens repaired_tokens evicted_tokens batch_size"
).split()


def inspector_page(answers: Sequence[tuple[Mapping[str, Any], Trace]]) -> str:
    """Return the page of an answer, with a switch to another one to the same prompt if that is given.

    Parameters
    ----------
    answers : sequence of (mapping, Trace)
        The report of each answer as a dictionary, and its trace; the first is what the page is about.
    """
    traces = [trace for _, trace in answers]
    data = {
        "tokens": traces[0].legend.texts(traces[0].token_ids),
        "differs": _first_difference([trace.output_ids for trace in traces]),
        "views": [_view(report, trace) for report, trace in answers],
    }
    style, script = _part("inspector.css"), _part("inspector.js")
    return Template(_part("inspector.html")).substitute(
        style=style,
        script=script,
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=_escaped(data),
    )


def framed(page: str) -> str:
    """Return a frame for a notebook with a page in it, so that the page's own policy holds and the notebook's styles do not."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" title="cacheblend-rag inspector" '
        f'width="100%" height="{_FRAME_HEIGHT}" style="border: 0; color-scheme: light dark"></iframe>'
    )


@cache
def _part(name: str) -> str:
    return files("cacheblend_rag.page").joinpath(name).read_text(encoding="utf-8")


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


def _view(report: Mapping[str, Any], trace: Trace) -> dict[str, Any]:
    """Return what the page shows of one answer."""
    contexts = trace.legend.contexts(trace.chunks)
    return {
        "full": report["selector"] == "full",
        "answer": trace.legend.texts(trace.output_ids),
        "figures": {name: report[name] for name in _FIGURES},
        "fates": [[fate, len(list(rows))] for fate, rows in groupby(_fates(trace))],
        "chunks": [_chunk(chunk, context) for chunk, context in zip(trace.chunks, contexts, strict=True)],
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


def _chunk(chunk: Any, context: ChunkContext) -> dict[str, Any]:
    return {
        "start": chunk.start,
        "stop": chunk.stop,
        "id": chunk.id,
        "document": context.document,
        "tier": chunk.tier,
        "reason": chunk.reason,
        "attention": chunk.attention,
        "behind": None if context.ids is None else list(context.ids),
        "behindTokens": context.tokens,
    }


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
