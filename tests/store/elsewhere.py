"""A store in this process or another one."""

import os
import signal
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from operator import attrgetter
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import KVStore, open_store
from tests.store.kit import PROCESSES, read


@dataclass(frozen=True)
class Opened:
    """How a store is opened."""

    folder: Path | None
    ram_bytes: int
    disk_bytes: int | None = None


class LocalStore:
    """A store in this process."""

    def __init__(self, opened: Opened) -> None:
        self._store: KVStore = open_store(opened.folder, opened.ram_bytes, opened.disk_bytes)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return attrgetter(method)(self._store)(*arguments, **options)

    def read(self, key: str, layers: int) -> ChunkKV | int | None:
        """Read all layers, or the first few; return the KV, how many were read, or None if it is not held or damaged."""
        reader = self._store.open(key)
        try:
            if reader is None or layers >= reader.num_layers:
                return reader and read(reader)
        except ChunkReadError:
            return None
        return len([reader.layer(layer) for layer in range(layers)])

    def end(self) -> None:
        self._store.close()

    def process(self) -> int:
        return os.getpid()


class StoreManager(BaseManager):
    """A process that has a store."""


StoreManager.register("open", LocalStore)


class RemoteStore:
    """The same as a `LocalStore` in another process."""

    def __init__(self, opened: Opened) -> None:
        self._manager = StoreManager(ctx=PROCESSES)
        self._manager.start()
        self._there = self._manager.open(opened)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._there, name)

    def end(self) -> None:
        self._there.end()
        self._manager.shutdown()

    def kill(self) -> None:
        """End the process where it stands."""
        os.kill(self._there.process(), signal.SIGKILL)
        self._manager.shutdown()
