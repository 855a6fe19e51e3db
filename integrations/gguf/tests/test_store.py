"""What is kept on disk: damaged in many ways, left by a process that was killed, shared by two, and deleted."""

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cacheblend_gguf import GGUFEngine
from cacheblend_rag import EngineConfig
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from integrations.gguf.tests.kit import ask, gemma, harbour, smollm

WAYS = pytest.mark.parametrize("ways", [40, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
OPENED = {"n_ctx": 512, "n_threads": 2}


@pytest.fixture(scope="module", params=[smollm, pytest.param(gemma, marks=pytest.mark.full)], ids=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GGUFEngine, Path]]:
    """Yield an engine that keeps nothing in RAM, with one document, and the folder of its store."""
    folder = tmp_path_factory.mktemp("store")
    # What is asked twice is read from disk twice.
    config = EngineConfig(ram_bytes=0, disk_codec="native", prefix_bytes=0)
    with GGUFEngine.from_pretrained(model, store=folder, config=config, **OPENED) as engine:
        engine.add(harbour())
        yield engine, folder


def remade(change: Callable[[ChunkKV], ChunkKV]) -> Callable[[bytes, str, Path], bytes]:
    """Return what writes KV anew as a file that is whole: a process that is wrong could have."""

    def write(data: bytes, key: str, file: Path) -> bytes:
        whole = ChunkFile.open(file, key)
        kv = ChunkKV(whole.token_ids, whole.start, [whole.layer(n) for n in range(whole.num_layers)], whole.context)
        return b"".join(encode_chunk(key, change(kv)).buffers)

    return write


def with_layers(change: Callable[[LayerKV], LayerKV]) -> Callable[[ChunkKV], ChunkKV]:
    return lambda kv: ChunkKV(kv.token_ids, kv.start, [change(layer) for layer in kv.layers], kv.context)


def as_q8(layer: LayerKV) -> LayerKV:
    return LayerKV(*(torch.zeros((1, each.shape[1], each.shape[2] // 32 * 34), dtype=torch.uint8) for each in layer))


WRONG = {
    "another place": remade(lambda kv: ChunkKV(kv.token_ids, kv.start + 7, kv.layers, kv.context)),
    "a place before all": remade(lambda kv: ChunkKV(kv.token_ids, -9, kv.layers, kv.context)),
    "a place beyond all": remade(lambda kv: ChunkKV(kv.token_ids, 10**9, kv.layers, kv.context)),
    "other tokens": remade(lambda kv: ChunkKV(kv.token_ids[::-1], kv.start, kv.layers, kv.context)),
    "fewer rows": remade(with_layers(lambda layer: LayerKV(*(each[:, 1:] for each in layer)))),
    "another model's rows": remade(with_layers(lambda layer: LayerKV(*(each[..., :64] for each in layer)))),
    "another type": remade(with_layers(lambda layer: LayerKV(*(each.float() for each in layer)))),
    "another KV type": remade(with_layers(as_q8)),
    "fewer layers": remade(lambda kv: ChunkKV(kv.token_ids, kv.start, kv.layers[:-1], kv.context)),
    "another version": lambda data, key, file: data.replace(b"chunk kv 2", b"chunk kv 9", 1),
    "another key": lambda data, key, file: data.replace(key[:8].encode(), b"00000000", 1),
    "nothing": lambda data, key, file: b"",
    "a page": lambda data, key, file: b"<html>" * 999,
}


def damaged(way: int, data: bytes, key: str, file: Path) -> bytes:
    """Return the bytes of a file that is whole, damaged in one of many ways."""
    draw = random.Random(way)
    if way < len(WRONG):
        return list(WRONG.values())[way](data, key, file)
    # Half of them in the head.
    place = draw.randrange(len(data) if way % 2 else 9000)
    if way % 3 == 0:
        return data[:place]
    if way % 3 == 1:
        return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    return data[:place] + draw.randbytes(min(64, len(data) - place)) + data[place + 64 :]


@WAYS
def test_damage_is_a_miss_and_the_answer_right(stored: tuple[GGUFEngine, Path], ways: int) -> None:
    engine, folder = stored
    prompt = ask("h0")
    wanted = engine.generate(prompt, 2)
    [record] = engine.records(["h0"])
    assert record is not None
    for way in range(ways):
        [file] = folder.rglob(f"{record.key}*.safetensors")
        changed = damaged(way, file.read_bytes(), record.key, file)
        file.unlink()
        file.write_bytes(changed)
        found = engine.generate(prompt, 2)
        assert (found.report.misses, found.token_ids) == (1, wanted.token_ids), way
        engine.flush()
    assert engine.generate(prompt, 2).report.hits == 1


CHILD = """
import sys
from cacheblend_gguf import GGUFEngine
from cacheblend_rag import EngineConfig
from integrations.gguf.tests.kit import ask, harbour
exact = EngineConfig(disk_codec="native")
with GGUFEngine.from_pretrained(sys.argv[1], store=sys.argv[2], config=exact, n_ctx=512, n_threads=1) as engine:
    engine.add(harbour(), progress=lambda done, total: print(done, flush=True))
    print(engine.generate(ask("h2", "h0"), 6).text.encode(), flush=True)
"""


def child(model: Path, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(model), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_kill_and_two_processes(model: Path, tmp_path: Path) -> None:
    with GGUFEngine.from_pretrained(model, **OPENED) as engine:
        engine.add(harbour())
        wanted = engine.generate(ask("h2", "h0"), 6).text
    with child(model, tmp_path) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
    with (
        child(model, tmp_path) as other,
        GGUFEngine.from_pretrained(model, store=tmp_path, config=EngineConfig(disk_codec="native"), **OPENED) as engine,
    ):
        engine.add(harbour())
        assert engine.generate(ask("h2", "h0"), 6).text == wanted
        assert other.communicate()[0].splitlines()[-1] == str(wanted.encode())
        assert other.returncode == 0
        assert engine.generate(ask("h2", "h0"), 6).report.hits == 2
        engine.delete([chunk.id for chunk in harbour() if chunk.id is not None])
    assert not list(tmp_path.rglob("*.safetensors"))
