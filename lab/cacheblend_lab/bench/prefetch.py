"""Time to first token after a reranker, with and without the candidates' KV prefetched while it works."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median

from cacheblend_lab.bench.runner import Figures, Say, in_rounds, median_ratio, spread
from cacheblend_lab.bench.shapes import RandomModel
from cacheblend_lab.bench.tiers import cold_folder, drop_cached, still_cached
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport

__all__ = ["measure"]


def measure(
    *,
    shape: str,
    device: str,
    dtype: str,
    candidates: int,
    chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    reranker_ms: float,
    ratio: float,
    selector: str,
    folder: Path | None,
    repeats: int,
    say: Say,
) -> Figures:
    """Return the figures of each method."""
    if chunks > candidates:
        raise ConfigError(f"chunks={chunks} cannot be chosen from candidates={candidates}")
    say("making the model and its chunks")
    made = RandomModel(shape, device, dtype)
    texts = made.chunks(candidates, chunk_tokens)
    names = [str(chunk.id) for chunk in texts]
    prompt = BlendPrompt(chunks=names[:chunks], suffix=made.text(question_tokens))
    settings = {"selector": selector, "recompute_ratio": ratio}
    with cold_folder(folder) as store:
        with made.engine(store, **settings) as engine:
            engine.add(texts)

        def run(method: str) -> tuple[float, BlendReport]:
            # A new engine each time, that has nothing in RAM.
            with made.engine(store, **settings) as engine:
                if method == "ram":
                    engine.prefetch(names).wait()
                drop_cached(store)
                if method == "prefetch":
                    engine.prefetch(names)
                # The reranker waits, as for an accelerator; one that computes on these cores leaves less of them to reading.
                time.sleep(reranker_ms / 1000)
                reranked = time.perf_counter()
                result = engine.prefill(prompt)
                # Reading the first output id waits for the device.
                int(result.logits.argmax())
                return time.perf_counter() - reranked, result.report

        runs = in_rounds(("disk", "prefetch", "ram"), run, repeats, say=say)
        facts = made.facts | {"still_cached": still_cached(store)}
    times = {name: [seconds for seconds, _ in each] for name, each in runs.items()}
    rows = []
    for name, each in runs.items():
        tiers = Counter(str(chunk.tier) for _, report in each for chunk in report.chunks)
        figures = {"method": name, **spread("ttft", times[name]), "of_disk": median_ratio(times[name], times["disk"])}
        figures["load_s"] = median(report.load_s for _, report in each)
        figures["read_from"] = ", ".join(f"{count} {tier}" for tier, count in sorted(tiers.items()))
        rows.append(figures)
    title = f"{made.label}: {chunks} of {candidates} chunks of {chunk_tokens} tokens, a reranker of {reranker_ms:g} ms"
    return Figures(title, rows, facts)
