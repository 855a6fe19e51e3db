"""A store in another process, called like one in this."""

import faulthandler
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import KVStore, open_store
from tests.store.kit import start_with_pipe


@dataclass(frozen=True)
class Opened:
    """How a store is opened."""

    folder: Path
    ram_bytes: int
    disk_bytes: int | None
    write_back_bytes: int
    device_bytes: int = 0


class LocalStore:
    """A store in this process whose clock the tests set."""

    def __init__(self, opened: Opened, seconds: float) -> None:
        self._seconds = seconds
        self.store: KVStore = open_store(
            opened.folder,
            opened.ram_bytes,
            opened.disk_bytes,
            write_back_bytes=opened.write_back_bytes,
            clock=lambda: self._seconds,
            device_bytes=opened.device_bytes,
        )

    def passes(self, seconds: float) -> None:
        self._seconds += seconds

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return attrgetter(method)(self.store)(*arguments, **options)

    def read(self, key: str, layers: int) -> ChunkKV | int | None:
        """Read all layers, or the first few; return the KV, how many were read, or None if it is not held."""
        reader = self.store.open(key)
        if reader is None:
            return None
        if layers < reader.num_layers:
            for layer in range(layers):
                reader.layer(layer)
            return layers
        kv = ChunkKV(reader.token_ids, reader.start, list(map(reader.layer, range(reader.num_layers))), reader.context)
        # As the loader does where the first layer is computed in full.
        for number in range(1, reader.num_layers):
            reader.keep(number, kv.layers[number])
        reader.finish()
        return kv

    def end(self) -> None:
        self.store.close()


class RemoteStore:
    """The same in another process."""

    def __init__(self, opened: Opened, seconds: float) -> None:
        self._process, self._pipe = start_with_pipe(serve, opened, seconds)

    def passes(self, seconds: float) -> None:
        self._ask("passes", seconds)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._ask("call", method, *arguments, **options)

    def read(self, key: str, layers: int) -> ChunkKV | int | None:
        result: ChunkKV | int | None = self._ask("read", key, layers)
        return result

    def end(self) -> None:
        self._ask("end")
        self._process.join(30)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End the process where it stands."""
        self._process.kill()
        self._process.join()

    def _ask(self, deed: str, *arguments: Any, **options: Any) -> Any:
        self._pipe.send((deed, arguments, options))
        assert self._pipe.poll(60), "the other process does not answer"
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        return result


def serve(pipe: Connection, opened: Opened, seconds: float) -> None:
    """Do what is asked until `end` is."""
    faulthandler.enable()
    store = LocalStore(opened, seconds)
    deed = ""
    while deed != "end":
        deed, arguments, options = pipe.recv()
        act: Callable[..., Any] = getattr(store, deed)
        try:
            pipe.send((act(*arguments, **options), None))
        except Exception as error:
            pipe.send((None, error))
