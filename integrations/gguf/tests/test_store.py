"""Stored KV that is whole, and not what it is stored for: it is a miss, and never reaches llama.cpp."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cacheblend_gguf import GGUFEngine
from cacheblend_rag import EngineConfig
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from integrations.gguf.tests.kit import ask, gemma, harbour, smollm


@pytest.fixture(scope="module", params=[smollm, pytest.param(gemma, marks=pytest.mark.full)], ids=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFEngine, Path]]:
    """Yield an engine that keeps nothing in RAM, with one document, and the folder of its store."""
    folder = tmp_path_factory.mktemp("store")
    # What is asked twice is read from disk twice.
    config = EngineConfig(ram_bytes=0, disk_codec="native", prefix_bytes=0)
    with GGUFEngine.from_pretrained(model, store=folder, config=config, n_ctx=512) as engine:
        engine.add(harbour())
        yield engine, folder


def with_layers(change: Callable[[LayerKV], LayerKV]) -> Callable[[ChunkKV], ChunkKV]:
    return lambda kv: ChunkKV(kv.token_ids, kv.start, [change(layer) for layer in kv.layers], kv.context)


def as_q8(layer: LayerKV) -> LayerKV:
    return LayerKV(*(torch.zeros((1, each.shape[1], each.shape[2] // 32 * 34), dtype=torch.uint8) for each in layer))


WRONG: dict[str, Callable[[ChunkKV], ChunkKV]] = {
    "another place": lambda kv: ChunkKV(kv.token_ids, kv.start + 7, kv.layers, kv.context),
    "a place before all": lambda kv: ChunkKV(kv.token_ids, -9, kv.layers, kv.context),
    "a place beyond all": lambda kv: ChunkKV(kv.token_ids, 10**9, kv.layers, kv.context),
    "other tokens": lambda kv: ChunkKV(kv.token_ids[::-1], kv.start, kv.layers, kv.context),
    "fewer rows": with_layers(lambda layer: LayerKV(*(each[:, 1:] for each in layer))),
    "another model's rows": with_layers(lambda layer: LayerKV(*(each[..., :64] for each in layer))),
    "another type": with_layers(lambda layer: LayerKV(*(each.float() for each in layer))),
    "another KV type": with_layers(as_q8),
    "fewer layers": lambda kv: ChunkKV(kv.token_ids, kv.start, kv.layers[:-1], kv.context),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_a_miss_and_the_answer_right(stored: tuple[GGUFEngine, Path], wrong: str) -> None:
    engine, folder = stored
    prompt = ask("h0")
    wanted = engine.generate(prompt, 2)
    [record] = engine.records(["h0"])
    assert record is not None
    [file] = folder.rglob(f"{record.key}*.safetensors")
    whole = ChunkFile.open(file, record.key)
    kv = ChunkKV(whole.token_ids, whole.start, [whole.layer(n) for n in range(whole.num_layers)], whole.context)
    changed = b"".join(encode_chunk(record.key, WRONG[wrong](kv)).buffers)
    file.unlink()
    file.write_bytes(changed)
    found = engine.generate(prompt, 2)
    assert (found.report.misses, found.token_ids) == (1, wanted.token_ids)
    engine.flush()
    assert engine.generate(prompt, 2).report.hits == 1
