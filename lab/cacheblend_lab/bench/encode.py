"""Adding chunks, against the model's own batched forward and encoding each chunk once, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from cacheblend_lab.bench.runner import Figures, Say, in_rounds, median_ratio, spread
from cacheblend_lab.bench.shapes import RandomModel
from cacheblend_rag.chunk import Chunk, chunk_key
from cacheblend_rag.encode import Encoder, Target, plan_batches
from cacheblend_rag.model import inspect_model
from cacheblend_rag.store import open_store

__all__ = ["measure"]


class _Run(NamedTuple):
    seconds: float
    kv_bytes: int = 0


def measure(
    *,
    shape: str,
    device: str,
    dtype: str,
    chunks: int,
    chunk_tokens: int,
    prefix_tokens: int,
    batch_tokens: int,
    document_chunks: int,
    folder: Path | None,
    repeats: int,
    say: Say,
) -> Figures:
    """Return the figures of each method."""
    say("making the model and its chunks")
    made = RandomModel(shape, device, dtype)
    prefix, ids = tuple(made.ids(prefix_tokens)), [tuple(made.ids(chunk_tokens)) for _ in range(chunks)]
    given, start = [], 0
    for number, token_ids in enumerate(ids):
        text = " ".join(f"t{token}" for token in token_ids)
        document = str(number // document_chunks) if document_chunks else None
        # Places are compared within a document only.
        given.append(Chunk(text, f"chunk {number}", document=document, start=start if document else None))
        start += len(text) + 1
    plan = plan_batches([chunk_tokens] * chunks, prefix_tokens, batch_tokens)
    batches = [torch.tensor([[*prefix, *ids[index]] for index in batch], device=device) for batch in plan]

    @torch.no_grad()
    def forward(some: Sequence[torch.Tensor]) -> _Run:
        def work() -> None:
            for batch in some:
                made.model(input_ids=batch, use_cache=True, logits_to_keep=1)

        return _Run(_timed(made, work))

    def once(some: Sequence[tuple[int, ...]]) -> _Run:
        encoder = Encoder(inspect_model(made.model), prefix, batch_tokens)
        with closing(open_store(None, 2**62)) as store:

            def work() -> None:
                for batch in encoder.encode([Target(each) for each in some]):
                    for index, kv in batch:
                        store.cache(chunk_key("", some[index]), kv, "")

            return _Run(_timed(made, work), store.stats().ram_bytes)

    def add(calls: Sequence[Sequence[Chunk]], on_disk: bool) -> _Run:
        with TemporaryDirectory(prefix="cacheblend-bench-", dir=folder) as parent:
            store = Path(parent) / "kv" if on_disk else None
            with made.engine(store, encode_batch_tokens=batch_tokens, preamble=prefix) as engine:
                seconds = _timed(made, lambda: [engine.add(call) for call in calls])
                return _Run(seconds, engine.store.stats().ram_bytes)

    methods: dict[str, Callable[[], _Run]] = {
        "forward": partial(forward, batches),
        "once": partial(once, ids),
        "ram": partial(add, [given], False),
        "disk": partial(add, [given], True),
        "singly": partial(add, [[chunk] for chunk in given], False),
    }
    # One batch, or what begins one, warms up.
    few = len(batches[0])
    forward(batches[:1]), once(ids[:few]), add([given[:few]], False), add([given[:few]], True)
    runs = in_rounds(list(methods), lambda name: methods[name](), repeats, unmeasured=0, say=say)
    times = {name: [run.seconds for run in each] for name, each in runs.items()}
    tokens = chunks * chunk_tokens
    rows = []
    for name, own in times.items():
        figures = {"method": name, "tokens": tokens, **spread("encode", own)}
        figures["tokens_per_s"] = tokens / figures["encode_s"]
        figures |= {f"of_{other}": median_ratio(own, times[other]) for other in ("forward", "once")}
        rows.append(figures | {"kv_bytes": runs[name][-1].kv_bytes})
    title = (
        f"{made.label}: {chunks} chunks of {chunk_tokens} tokens after a prefix of {prefix_tokens}, median of {repeats}"
    )
    return Figures(title, rows, made.facts)


def _timed(made: RandomModel, work: Callable[[], object]) -> float:
    made.wait()
    started = time.perf_counter()
    work()
    made.wait()
    return time.perf_counter() - started
