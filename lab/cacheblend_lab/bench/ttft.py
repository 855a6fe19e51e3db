"""Time to first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from cacheblend_lab.bench.runner import Figures, Row, Say, in_rounds, median_ratio, spread
from cacheblend_lab.bench.shapes import RandomModel
from cacheblend_lab.bench.tiers import cold_folder, drop_cached, still_cached
from cacheblend_lab.cli.options import parse_names, parse_numbers
from cacheblend_rag.chunk import BlendPrompt, FixedText
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import CACHE
from cacheblend_rag.report import BlendReport

__all__ = ["measure"]

_TIERS = ("ram", "disk")


class _Method(NamedTuple):
    name: str
    selector: str | None = None
    ratio: float | None = None
    tier: str | None = None


def measure(
    *,
    shape: str,
    device: str,
    dtype: str,
    chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    ratios: str,
    selectors: str,
    tiers: str,
    head_tokens: int,
    separator_tokens: int,
    folder: Path | None,
    repeats: int,
    say: Say,
) -> Figures:
    """Return the figures of each method, from each tier."""
    asked = [
        (ratio, name) for ratio in parse_numbers(ratios) for name in (parse_names(selectors) if ratio else ("none",))
    ]
    places = parse_names(tiers)
    for tier in places:
        if tier not in _TIERS:
            raise ConfigError(f"tier {tier!r} is not measured; choose among {', '.join(_TIERS)}")
    say("making the model and its chunks")
    made = RandomModel(shape, device, dtype)
    separator, head = made.text(separator_tokens), made.text(head_tokens)
    texts, question = made.chunks(chunks, chunk_tokens), made.text(question_tokens)
    ids = [str(chunk.id) for chunk in texts]
    prompts = {"reuse": BlendPrompt(chunks=ids, suffix=question)}
    if separator or head:
        prompts["gapless"] = BlendPrompt(FixedText(head), ids, question, separator)
    with ExitStack() as stack:
        cold = stack.enter_context(cold_folder(folder)) if "disk" in places else None
        engines = {}
        for name, tier in product(prompts, places):
            settings: dict[str, Any] = {"separator": separator} if name == "gapless" else {}
            if cold is not None and tier == "disk":
                settings |= {"ram_bytes": 0, "store": cold / name}
            engine = engines[name, tier] = stack.enter_context(made.engine(**settings))
            engine.add(texts)
            # A head is computed and stored by the first prompt that begins with it.
            engine.prefill(prompts[name], blend=engine.blend.replace(recompute_ratio=0.0))
            engine.flush()
        token_ids = engines["reuse", places[0]].prompt_ids(prompts["reuse"])
        whole = torch.tensor([token_ids], device=device)
        prefix = DynamicCache(config=made.model.config)
        # The BOS and the first chunk.
        cached = 1 + chunk_tokens
        _first_id(made, whole[:, :cached], prefix)

        def run(method: _Method) -> tuple[float, BlendReport | None]:
            if method.tier == "disk" and cold is not None:
                drop_cached(cold)
            made.wait()
            started, report = time.perf_counter(), None
            # Every method ends by reading the first output id, which waits for the device.
            if method.name == "full":
                _first_id(made, whole, None)
            elif method.tier is None:
                _first_id(made, whole[:, cached:], copy.deepcopy(prefix))
            else:
                name = method.name if method.name in prompts else "reuse"
                engine = engines[name, method.tier]
                chosen = {"selector": method.selector} if method.ratio else {}
                blend = engine.blend.replace(recompute_ratio=method.ratio, **chosen)
                result = engine.prefill(prompts[name], blend=blend)
                int(result.logits.argmax())
                report = result.report
            return time.perf_counter() - started, report

        methods = [_Method("full"), _Method("prefix_cache")]
        for ratio, selector in asked:
            for tier in places:
                methods += [_Method(name, selector, ratio, tier) for name in (("blend",) if ratio else prompts)]
        runs = in_rounds(methods, run, repeats, say=say)
        times = {method: [seconds for seconds, _ in each] for method, each in runs.items()}
        facts = made.facts | {
            "prompt_tokens": len(token_ids),
            "still_cached": None if cold is None else still_cached(cold),
        }
        rows = [_row(method, times, [report for _, report in runs[method] if report]) for method in methods]
    title = f"{made.label}: {chunks} chunks of {chunk_tokens} tokens and a question of {question_tokens}, median of {repeats}"
    return Figures(title, rows, facts)


@torch.no_grad()
def _first_id(made: RandomModel, ids: torch.Tensor, cache: DynamicCache | None) -> None:
    int(made.model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def _row(method: _Method, times: dict[_Method, list[float]], reports: list[BlendReport]) -> Row:
    def over(other: _Method) -> float | None:
        return median_ratio(times[method], times[other]) if other in times and method.tier else None

    of_reuse = over(method._replace(name="reuse"))
    return {
        "method": method.name,
        "selector": method.selector,
        "recompute_ratio": method.ratio,
        "tier": method.tier,
        "charged_ratio": median(report.charged_ratio for report in reports) if reports else None,
        **spread("ttft", times[method]),
        "speedup": median_ratio(times[_Method("full")], times[method]),
        "over_ram": over(method._replace(tier="ram")),
        "of_reuse": of_reuse and 1 / of_reuse,
        "load_s": median(report.load_s for report in reports) if reports else None,
        "load_bytes": round(median(report.load_bytes for report in reports)) if reports else None,
    }
