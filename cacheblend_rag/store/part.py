"""Reading some of a chunk's tokens."""

from __future__ import annotations

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.device import DeviceReader
from cacheblend_rag.store.reader import PassingReader

__all__ = ["part_of"]


def part_of(reader: KVReader, start: int, stop: int) -> KVReader:
    """Return a reader of the tokens from `start` to before `stop` of what `reader` reads.

    What is on a device is cut there. KV that is read in parts does not rise to a faster tier on its way through a prompt.
    """
    rows = slice(start, stop)
    return _ResidentPart(reader, rows) if isinstance(reader, DeviceReader) else _Part(reader, rows)


class _Part(PassingReader[KVReader]):
    def __init__(self, reader: KVReader, rows: slice) -> None:
        super().__init__(reader)
        self._rows = rows

    @property
    def packed_bytes(self) -> int:
        whole = self._reader.token_ids
        return self._reader.packed_bytes * len(whole[self._rows]) // len(whole)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._reader.token_ids[self._rows]

    @property
    def start(self) -> int:
        return self._reader.start + int(self._rows.start)

    def layer(self, index: int) -> LayerKV:
        return _cut(self._reader.layer(index), self._rows)


class _ResidentPart(DeviceReader):
    def __init__(self, reader: DeviceReader, rows: slice) -> None:
        super().__init__(reader.kv)
        self._rows = rows

    @property
    def packed_bytes(self) -> int:
        whole = self._kv.token_ids
        return self._kv.nbytes * len(whole[self._rows]) // len(whole)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._kv.token_ids[self._rows]

    @property
    def start(self) -> int:
        return self._kv.start + int(self._rows.start)

    def resident(self, index: int) -> LayerKV:
        return _cut(super().resident(index), self._rows)


def _cut(layer: LayerKV, rows: slice) -> LayerKV:
    return LayerKV(*(tensor[:, rows] for tensor in layer))
