"""KV to store, and processes to store it from."""

import multiprocessing
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import KVReader, KVStore, NodeRecord
from cacheblend_rag.store import open_store as _open_store

# One server imports torch once; each process is then forked from it, not from the tests.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.store.kit", "tests.store.elsewhere", "tests.store.workers"])


def key_of(number: int) -> str:
    """Return a store key."""
    return f"{number:02x}{number:030x}"


def make_kv(number: int, tokens: int = 6, layers: int = 3, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Return the KV that belongs to `key_of(number)`, in layers of unequal shapes."""
    random_numbers = torch.Generator().manual_seed(number)

    def tensor(heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(heads, tokens, head_dim, generator=random_numbers).to(dtype)

    kv = [LayerKV(tensor(2 + n % 2, 8), tensor(2 + n % 2, 4)) for n in range(layers)]
    return ChunkKV(tuple(random.Random(number).choices(range(60_000), k=tokens)), 1 + number % 3, kv)


def record(node: str, number: int) -> NodeRecord:
    """Return the record of a name for `key_of(number)`."""
    return NodeRecord(node, key_of(number), f"hash{number}", make_kv(number).token_ids)


def piece(node: str, document: str, start: int, number: int = 0) -> NodeRecord:
    """Return the record of a chunk of a document."""
    return NodeRecord(node, key_of(number), f"hash{number}", (number, 1, 2), (), document, start, 3, (1, 2, 3))


_made: list[KVStore] = []


def open_store(*arguments: Any, **options: Any) -> KVStore:
    """Open a store that is closed with the test, if the test has not closed it."""
    _made.append(_open_store(*arguments, **options))
    return _made[-1]


@pytest.fixture(autouse=True)
def _stores_are_closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def put_kv(store: KVStore, key: str, kv: ChunkKV, *, tenant: str = "") -> None:
    """Put KV, under a name that nobody else gives."""
    store.name(f"put{tenant}", [NodeRecord(key, key, key, kv.token_ids)], tenant=tenant)
    store.put(key, kv, tenant=tenant)


def put(store: KVStore, *numbers: int) -> None:
    """Put the KV of numbers."""
    for number in numbers:
        put_kv(store, key_of(number), make_kv(number))


def put_miss(store: KVStore, number: int, node: str = "") -> None:
    """Keep the KV of a miss, as an answer does."""
    store.put_later(key_of(number), make_kv(number), "ns", {}, record(node or f"n{number}", number))


def add(store: KVStore, *numbers: int) -> None:
    """Put the KV of numbers, each under a name."""
    for number in numbers:
        store.name("ns", [record(f"n{number}", number)])
        store.put(key_of(number), make_kv(number))


def opened(store: KVStore, key: str) -> KVReader:
    """Open what is there to be read."""
    reader = store.open(key)
    assert reader is not None
    return reader


def read(reader: KVReader) -> ChunkKV:
    """Read every layer, as a prompt does."""
    layers = [reader.layer(number) for number in range(reader.num_layers)]
    reader.finish()
    return ChunkKV(reader.token_ids, reader.start, layers, reader.context)


def same(left: ChunkKV, right: ChunkKV) -> bool:
    """Return whether two chunks' KV is equal bit by bit."""
    if (left.token_ids, left.start, len(left.layers)) != (right.token_ids, right.start, len(right.layers)):
        return False
    pairs = [pair for a, b in zip(left.layers, right.layers, strict=True) for pair in zip(a, b, strict=True)]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def held(store: KVStore, numbers: range) -> list[int]:
    """Return those of the numbers whose KV is held."""
    return [number for number in numbers if store.holds([key_of(number)])[0]]


def is_held(store: KVStore, number: int) -> bool:
    """Return whether a chunk is there, and reads as it was put."""
    reader = store.open(key_of(number))
    return reader is not None and same(read(reader), make_kv(number))


def files_of(folder: Path) -> list[Path]:
    """Return the chunk files of a store."""
    return sorted((folder / "kv").glob("*/*"))


def damage(file: Path) -> None:
    """Change a bit of a chunk file's last bytes, which are those of its last layer."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x10
    file.write_bytes(content)


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a function of `tests.store.workers` in another process."""
    process = PROCESSES.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def start_with_pipe(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Run a function in another process, whose first argument is the other end of a pipe."""
    here, there = PROCESSES.Pipe()
    process = start(target, there, *arguments)
    there.close()
    return process, here


def run(target: Callable[..., None], *arguments: Any) -> None:
    """Run a function in another process to its end; what it raises fails the test."""
    process = start(target, *arguments)
    process.join(60)
    assert process.exitcode == 0


@contextmanager
def writing_elsewhere(folder: Path) -> Iterator[None]:
    """Have another process write to the index of a store without end."""
    command = (
        "import sqlite3, sys; "
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "connection.execute('BEGIN IMMEDIATE'); print('begun', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", command, str(folder / "index.sqlite")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "begun\n"
        try:
            yield
        finally:
            process.kill()


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system in memory; skip the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """Mount a file system again, "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free, as another program does; return the file that takes the room."""
    other = folder / "ballast"
    with suppress(OSError), open(other, "wb", buffering=0) as file:
        for size in (4096, 512):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return other
