"""``cacheblend-rag profile``: how fast a model is here, and what "auto" makes of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import (
    console,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.controller import Profile, Work
    from cacheblend_rag.engine import BlendEngine

__all__ = ["TYPICAL_CHUNKS", "kv_folder_of", "predicted_works", "profile"]

_CHUNKS = (1, 2, 6, 12)
TYPICAL_CHUNKS = 6
"""The chunks of the prompt that one figure is given for."""
_QUESTION_TOKENS = 32


def profile(
    model: ModelOption = "reference",
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="A store; its disk is measured, and the profile kept there."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long measuring may take.")] = 30.0,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a chunk in the prompts that are predicted.")
    ] = 256,
    prices: Annotated[
        str | None,
        typer.Option(help="Prices a GB and month, as in ram=3,disk=0.1: name the cheapest tier that adds no delay."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast a model computes and loads here; recompute_ratio="auto" chooses by it from then on."""
    from cacheblend_rag.controller import cheapest_tier

    priced = _parse_prices(prices)
    with open_engine(model, store=kv_folder_of(store), recompute_ratio="auto") as engine:
        with console(stderr=True).status("measuring") as status:
            found = engine.profile(budget_s=seconds, progress=lambda what: status.update(f"measuring: {what}"))
        quality = engine.config.quality_ratio
        works = predicted_works(engine, found, chunk_tokens)
    rows = _rows(found, works, quality)
    _show(found, rows, chunk_tokens)
    if priced:
        typical = next(work for (_, _, chunks), work in works.items() if chunks == TYPICAL_CHUNKS)
        choice = cheapest_tier(found, typical, quality, priced)
        rows.append({"kind": "cheapest", **asdict(choice)})
        typer.echo(
            f"cheapest without delay for {TYPICAL_CHUNKS} chunks: {choice.tier}, codec {choice.codec} "
            f"({choice.price:.3g} a month, "
            f"{say_seconds(choice.blend_s)} against {say_seconds(choice.fastest_s)} from the fastest)"
        )
    write_json(json_file, "profile", rows, model=model, profile=asdict(found))


def kv_folder_of(store: Path | None) -> Path | None:
    """Return the folder of KV in what ``warm`` made, or the folder itself where it is one."""
    from cacheblend_rag.documents import kv_folder

    if store is None:
        return None
    return kv_folder(store) if (kv_folder(store) / "store.json").is_file() else store


def predicted_works(engine: BlendEngine, found: Profile, chunk_tokens: int) -> dict[tuple[str, str, int], Work]:
    """Return prompts of some numbers of chunks, with KV in each tier that was measured.

    Returns
    -------
    dict of (str, str, int) to Work
        By tier, codec and number of chunks.
    """
    return {
        (cost.tier, cost.codec, chunks): _work(engine, found, cost.tier, cost.codec, chunks, chunk_tokens)
        for cost in found.loads
        for chunks in _CHUNKS
    }


def _work(engine: BlendEngine, found: Profile, tier: str, codec: str, chunks: int, tokens: int) -> Work:
    """Return a prompt of so many chunks behind one token, with a question, its KV in one tier."""
    from cacheblend_rag.controller import StoredKV, prompt_work
    from cacheblend_rag.layout import ChunkSpan, PromptLayout

    assert engine.decoder is not None
    cost = found.load_cost(tier, codec)
    assert cost is not None
    spans = tuple(
        ChunkSpan(1 + number * tokens, 1 + (number + 1) * tokens, 1 + number * tokens) for number in range(chunks)
    )
    length = 1 + chunks * tokens + _QUESTION_TOKENS
    layout = PromptLayout((0,) * length, tuple(range(length)), spans)
    stored = StoredKV(tier, codec, chunks, round(cost.bytes_per_token * chunks * tokens))
    return prompt_work(engine.decoder, engine.config, layout, (stored,))


def _rows(found: Profile, works: dict[tuple[str, str, int], Work], quality: float) -> list[dict[str, Any]]:
    from cacheblend_rag.controller import choose

    rows: list[dict[str, Any]] = []
    for full in found.prefill_points:
        fitted = found.prefill.seconds(full.tokens)
        rows.append({"kind": "prefill", "tokens": full.tokens, "seconds": full.seconds, "fitted_s": fitted})
    for blend in found.blend_points:
        rows.append({"kind": "blend", "tokens": blend.tokens, "rows": blend.rows, "seconds": blend.seconds})
    for cost in found.loads:
        speed = 1 / cost.per_byte_s if cost.per_byte_s else None
        rows.append({"kind": "load", **asdict(cost), "bytes_per_s": speed})
    for (tier, codec, chunks), work in works.items():
        choice = choose(found, work, quality)
        rows.append(
            {
                "kind": "choice",
                "tier": tier,
                "codec": codec,
                "chunks": chunks,
                "tokens": work.context_tokens,
                "recompute_ratio": choice.ratio,
                "blend_s": choice.blend_s,
                "full_s": choice.full_s,
                "fallback_reason": choice.fallback_reason,
            }
        )
    return rows


def _show(found: Profile, rows: list[dict[str, Any]], chunk_tokens: int) -> None:
    facts = (
        ", ".join(f"{found.identity[name]}" for name in ("dtype", "device")) + f", {found.identity['threads']} threads"
    )
    lines: list[tuple[Any, ...]] = [
        (row["kind"], row["tokens"], row.get("rows"), say_seconds(row["seconds"]))
        for row in rows
        if row["kind"] in ("prefill", "blend")
    ]
    show_table(
        f"computing ({facts}; measured in {say_seconds(found.measured_s)})",
        ("", "tokens", "rows computed", "time"),
        lines,
    )
    lines = [
        (
            row["tier"],
            row["codec"],
            None if row["bytes_per_s"] is None else f"{say_bytes(row['bytes_per_s'])}/s",
            f"{row['per_read_s'] * 1e6:.3g} µs",
            f"{row['overlap']:.0%}",
        )
        for row in rows
        if row["kind"] == "load"
    ]
    loading = ("tier", "codec", "throughput", "a chunk and layer", "hides behind computing")
    show_table("loading, putting layers together included", loading, lines, text_columns=2)
    lines = [
        (
            row["tier"],
            row["codec"],
            "full prefill" if row["fallback_reason"] else f"{row['recompute_ratio']:.2f}",
            row["chunks"],
            say_seconds(row["blend_s"]),
            say_seconds(row["full_s"]),
        )
        for row in rows
        if row["kind"] == "choice"
    ]
    choosing = ("tier", "codec", "auto chooses", "chunks", "blended", "full prefill")
    show_table(f"predicted for chunks of {chunk_tokens} tokens", choosing, lines, text_columns=3)


def _parse_prices(text: str | None) -> dict[str, float]:
    prices = {}
    for part in text.split(",") if text else ():
        tier, equals, price = part.partition("=")
        try:
            prices[tier.strip()] = float(price)
        except ValueError:
            equals = ""
        if not equals or not tier.strip():
            raise ConfigError(f"{part.strip()!r} in --prices is no price; write for example ram=3,disk=0.1")
    return prices
