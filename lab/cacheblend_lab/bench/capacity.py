"""What stored KV takes of memory, disk and time: ``python -m cacheblend_lab.bench.capacity MODEL``.

MODEL is a GGUF file, or a folder for transformers, in the dtype that an engine chooses.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from cacheblend_lab.bench.real import _alone as alone_of
from cacheblend_lab.bench.runner import Figures, Row, in_rounds, median_ratio, rss_bytes, seconds_of
from cacheblend_lab.bench.tiers import cold_folder, drop_cached, still_cached
from cacheblend_lab.demo.manual import pages
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.store import KVStore, NodeRecord, open_store
from cacheblend_rag.store.memory import packed_kv

_CHUNK_TOKENS = 250
_QUESTION = "\n\nQuestion: What does the passage say about values?\nAnswer:"
_NAMESPACE = "bench"
# Nothing is limited by it.
_NO_LIMIT = 2**50


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder of transformers.")],
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 1400,
    kv_mb: Annotated[int, typer.Option(help="KV whose memory is measured, in millions of bytes.")] = 1000,
    chunks: Annotated[int, typer.Option(help="Chunks that are added in each round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Measurements, of which medians are shown.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """Measure the memory that KV takes, first tokens by where it is, and how fast it is added."""
    make_quiet()
    with (
        cold_folder(None) as folder,
        BlendEngine.from_pretrained(model, config=EngineConfig(prefix_bytes=0), store=folder) as engine,
    ):
        kind = "GGUF" if hasattr(engine, "llama") else str(engine.model.dtype).removeprefix("torch.")
        rows = [
            *_first_tokens(engine, folder, tokens, rounds),
            *_ingestion(engine, tokens, chunks, rounds),
            *_memory(engine, folder, kv_mb * 10**6),
        ]
        facts = {"model": Path(model).name, "still_cached": still_cached(folder)}
    title = f"{Path(model).name}, {kind}, {torch.get_num_threads()} threads, medians of {rounds}"
    for what in dict.fromkeys(row["what"] for row in rows):
        Figures(title, [row for row in rows if row["what"] == what]).show()
    figures = Figures(title, rows, facts)
    setting = {"tokens": tokens, "kv_mb": kv_mb, "chunks": chunks, "rounds": rounds}
    figures.write(json_file, "bench capacity", setting)


def _cut(engine: BlendEngine, name: str, count: int) -> list[Chunk]:
    """Return so many chunks of the manual's pages, each page a document."""
    found: list[Chunk] = []
    for page, text in sorted(pages().items()):
        ids = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        start = 0
        for place in range(0, len(ids), _CHUNK_TOKENS):
            part = engine.tokenizer.decode(ids[place : place + _CHUNK_TOKENS])
            found.append(Chunk(part, f"{name}-{len(found)}", document=f"{name}-{page}", start=start))
            start += len(part)
    return found[:count]


def _first_tokens(engine: BlendEngine, folder: Path, tokens: int, rounds: int) -> Iterator[Row]:
    """Yield the times to the first token from RAM and from disk, and that of reading the same files plainly."""
    text = "\n\n".join(text for _, text in sorted(pages().items()))
    ids = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    numbers = range(max(tokens // _CHUNK_TOKENS, 1))
    parts = [ids[_CHUNK_TOKENS * number : _CHUNK_TOKENS * (number + 1)] for number in numbers]
    engine.add(Chunk(engine.tokenizer.decode(part), f"read-{number}") for number, part in enumerate(parts))
    prompt = BlendPrompt(segments=["Read this.\n\n", *(ChunkRef(f"read-{number}") for number in numbers), _QUESTION])
    records = [each for each in engine.records([f"read-{number}" for number in numbers]) if each is not None]
    # As a prompt reads them: the first right behind the preamble, the others behind others.
    keys = [each.keys[-1] if number else each.key for number, each in enumerate(records)]
    files = [folder / "kv" / key[:2] / f"{key}.safetensors" for key in keys]
    with engine.another(config=EngineConfig(prefix_bytes=0, ram_bytes=0), store=folder) as from_disk:

        def run(method: str) -> float:
            if method in ("cold disk", "plain read of a cold disk"):
                drop_cached(folder)
            if method == "plain read of a cold disk":
                return seconds_of(lambda: [file.read_bytes() for file in files])
            asked = engine if method == "RAM" else from_disk
            return seconds_of(asked.generate, prompt, 1)

        methods = ("RAM", "warm disk", "cold disk", "plain read of a cold disk")
        times = in_rounds(methods, run, rounds, say=lambda _: None)
    nbytes = sum(file.stat().st_size for file in files)
    for method, took in times.items():
        row: Row = {"what": "first token", "method": method, "first_s": median(took)}
        if method == methods[-1]:
            yield row | {"read_bytes": nbytes, "mb_per_s": nbytes / 1e6 / median(took)}
        else:
            yield row | {"over_ram": median_ratio(took, times["RAM"])}


def _ingestion(engine: BlendEngine, tokens: int, chunks: int, rounds: int) -> Iterator[Row]:
    """Yield how many tokens a second are added, beside those that the model reads alone in a prompt."""
    alone, _ = alone_of(engine)
    text = "\n\n".join(text for _, text in sorted(pages().items()))
    ids = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    given = _cut(engine, "added", chunks)
    counted = _count(engine, given)

    def run(method: str) -> float:
        if method == "alone":
            return seconds_of(alone, ids, 1) / len(ids)
        with engine.another(config=EngineConfig(prefix_bytes=0)) as fresh:
            return seconds_of(fresh.add, given)

    times = in_rounds(("alone", "add"), run, rounds, say=lambda _: None)
    yield {
        "what": "ingestion",
        "method": "the model alone",
        "tokens": len(ids),
        "tokens_per_s": 1 / median(times["alone"]),
    }
    for method, count in counted.items():
        yield {
            "what": "ingestion",
            "method": method,
            "tokens": count,
            "tokens_per_s": count / median(times["add"]),
            "of_alone": median_ratio([count * each for each in times["alone"]], times["add"]),
        }


def _count(engine: BlendEngine, given: Sequence[Chunk]) -> dict[str, int]:
    """Return how many tokens are read to add chunks, and how many of these are the chunks' own, each of them read twice."""
    with engine.another(config=EngineConfig(prefix_bytes=0)) as fresh:
        fresh.add(given)
        targets = []
        for each in filter(None, fresh.records([str(chunk.id) for chunk in given])):
            behind = [()] if each.later is None else [(), each.later.behind]
            targets += [Target(each.token_ids + each.separator, context) for context in behind]
        read = fresh._supply.encoder.num_tokens(targets)
    return {"add, all that is read": read, "add, chunk tokens twice": sum(len(each.token_ids) for each in targets)}


def _memory(engine: BlendEngine, folder: Path, nbytes: int) -> Iterator[Row]:
    """Yield the memory that so much KV takes in processes of their own: of RAM alone, beside a disk, and on disk alone."""
    record = engine.records(["read-0"])[0]
    assert record is not None
    sample = folder.parent / "memory"
    # Many times that of a real chunk.
    with closing(open_store(folder, ram_bytes=0)) as store, closing(open_store(sample, ram_bytes=0)) as many:
        reader = store.open(record.key)
        assert reader is not None
        kv = packed_kv(reader)
        keys = [hashlib.blake2b(b"%d" % number, digest_size=20).hexdigest() for number in range(nbytes // kv.nbytes)]
        _name(many, keys)
        for key in keys:
            many.put(key, kv)
    limits = {"RAM alone": _NO_LIMIT, "RAM beside a disk": _NO_LIMIT, "RAM of half of it": nbytes // 2, "disk alone": 0}
    for method, limit in limits.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            row = pool.submit(_held, sample, keys, limit, method == "RAM alone").result()
        yield {"what": "memory", "method": method, "ram_bytes": None if limit == _NO_LIMIT else limit} | row


def _name(store: KVStore, keys: Iterable[str]) -> None:
    store.name(_NAMESPACE, [NodeRecord(key, key, key[:32], (1,)) for key in keys])


def _held(folder: Path, keys: Sequence[str], ram_bytes: int, alone: bool) -> Row:
    """Read KV into RAM as prompts do, or put it there alone; return what is held, and the memory that it takes."""
    with (
        closing(open_store(folder, ram_bytes=ram_bytes)) as store,
        closing(open_store(None, ram_bytes=ram_bytes)) as ram,
    ):

        def read(key: str) -> None:
            reader = store.open(key)
            assert reader is not None
            if alone:
                ram.put(key, packed_kv(reader))
                return
            for index in range(reader.num_layers):
                reader.layer(index)
            reader.finish()

        _name(ram, keys)
        # What a first use allocates for itself.
        read(keys[0])
        before_bytes, held_before = rss_bytes(), (ram if alone else store).stats().ram_bytes
        began = time.perf_counter()
        for key in keys[1:]:
            read(key)
        read_s = time.perf_counter() - began
        held = (ram if alone else store).stats().ram_bytes
        taken = rss_bytes() - before_bytes
    row: Row = {"held_bytes": held, "taken_bytes": taken, "read_s": read_s}
    return row | ({"taken_of_held": taken / (held - held_before)} if held > held_before else {})


if __name__ == "__main__":
    typer.run(main)
