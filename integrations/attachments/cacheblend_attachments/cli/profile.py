"""``cacheblend-rag profile``: how fast a model is here, and what `AutoRatio` makes of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import console, say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.cli.store import kv_folder_of

if TYPE_CHECKING:
    from cacheblend_attachments.auto import Profile, Work
    from cacheblend_rag.engine import BlendEngine

__all__ = [
    "MeasuredStoreOption",
    "PredictedTokensOption",
    "SecondsOption",
    "TYPICAL_CHUNKS",
    "predicted_works",
    "profile",
]

_CHUNKS = (1, 2, 6, 12)
TYPICAL_CHUNKS = 6
"""The chunks of the prompt that one figure is given for."""
_QUESTION_TOKENS = 32

SecondsOption = Annotated[float, typer.Option("--seconds", min=0.1, help="About how long measuring may take.")]
MeasuredStoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="A store; its disk is measured, and the profile is kept there."),
]
PredictedTokensOption = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="Tokens per chunk in the predicted prompts.")
]


def profile(
    model: ModelOption = "reference",
    store: MeasuredStoreOption = None,
    seconds: SecondsOption = 30.0,
    chunk_tokens: PredictedTokensOption = 256,
    quality_ratio: Annotated[float, typer.Option(min=0, max=1, help="The minimum ratio for AutoRatio.")] = 0.15,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast a model computes and loads here; an attached AutoRatio then uses the result."""
    from cacheblend_attachments.auto import AutoRatio

    with open_engine(model, store=kv_folder_of(store)) as engine:
        with console(stderr=True).status("measuring") as status:
            auto = engine.attach(AutoRatio())
            found = auto.profile(budget_s=seconds, progress=lambda what: status.update(f"measuring: {what}"))
        works = predicted_works(engine, found, chunk_tokens)
    rows = [*_show_computing(found), *_show_loading(found), *_show_choices(found, works, quality_ratio, chunk_tokens)]
    write_json(json_file, "profile", rows, model=model, profile=asdict(found))


def predicted_works(engine: BlendEngine, found: Profile, chunk_tokens: int) -> dict[tuple[str, str, int], Work]:
    """Return prompts by tier, codec and number of chunks, whose KV is in each tier that was measured."""
    from cacheblend_attachments.auto import StoredKV, prompt_work
    from cacheblend_rag.layout import ChunkSpan, PromptLayout

    assert engine.decoder is not None
    works = {}
    for cost in found.loads:
        for chunks in _CHUNKS:
            length = 1 + chunks * chunk_tokens + _QUESTION_TOKENS
            starts = range(1, length - _QUESTION_TOKENS, chunk_tokens)
            spans = tuple(ChunkSpan(start, start + chunk_tokens, start) for start in starts)
            layout = PromptLayout((0,) * length, tuple(range(length)), spans)
            stored = StoredKV(cost.tier, cost.codec, chunks, round(cost.bytes_per_token * chunks * chunk_tokens))
            works[cost.tier, cost.codec, chunks] = prompt_work(
                engine.decoder, engine.blend, engine.tuning, layout, (stored,)
            )
    return works


def _show_computing(found: Profile) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"kind": "prefill", **asdict(point), "fitted_s": found.prefill.seconds(point.tokens)}
        for point in found.prefill_points
    ]
    rows += [{"kind": "blend", **asdict(point)} for point in found.blend_points]
    about = found.identity
    title = (
        f"{about['dtype']}, {about['device']}, {about['threads']} threads; measured in {say_seconds(found.measured_s)}"
    )
    lines = [(row["kind"], row["tokens"], row["rows"], say_seconds(row["seconds"])) for row in rows]
    show_table(f"computing ({title})", ("", "tokens", "rows computed", "time"), lines)
    return rows


def _show_loading(found: Profile) -> list[dict[str, Any]]:
    lines = [
        (
            cost.tier,
            cost.codec,
            f"{say_bytes(1 / cost.per_byte_s)}/s" if cost.per_byte_s else None,
            f"{cost.per_read_s * 1e6:.3g} µs",
            f"{cost.overlap:.0%}",
        )
        for cost in found.loads
    ]
    columns = ("tier", "codec", "throughput", "a chunk and layer", "hides behind computing")
    show_table("loading, putting layers together included", columns, lines, text_columns=2)
    return [
        {"kind": "load", **asdict(cost), "bytes_per_s": 1 / cost.per_byte_s if cost.per_byte_s else None}
        for cost in found.loads
    ]


def _show_choices(
    found: Profile, works: dict[tuple[str, str, int], Work], quality: float, chunk_tokens: int
) -> list[dict[str, Any]]:
    from cacheblend_attachments.auto import choose

    rows, lines = [], []
    for (tier, codec, chunks), work in works.items():
        choice = choose(found, work, quality)
        assert choice.blend_s is not None and choice.full_s is not None
        chosen = "full prefill" if choice.fallback_reason else f"{choice.ratio:.2f}"
        lines.append((tier, codec, chosen, chunks, say_seconds(choice.blend_s), say_seconds(choice.full_s)))
        facts = asdict(choice)
        row = {"kind": "choice", "tier": tier, "codec": codec, "chunks": chunks, "tokens": work.context_tokens}
        rows.append(row | {"recompute_ratio": facts.pop("ratio"), **facts})
    columns = ("tier", "codec", "AutoRatio chooses", "chunks", "blended", "full prefill")
    show_table(f"predicted for chunks of {chunk_tokens} tokens", columns, lines, text_columns=3)
    return rows
