"""Behind what new chunks are measured: the chunks that they are likely to be retrieved with."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.store import KVStore, NodeRecord

__all__ = ["Neighbours"]


class Neighbours:
    """The neighbours of the chunks of one call.

    Parameters
    ----------
    assembler : Assembler
        Knows where names are, the encoding prefix and the model's window.
    found : dict of str to list of NodeRecord
        The neighbours of each text in reading order, by its key.
    """

    def __init__(self, assembler: Assembler, found: dict[str, list[NodeRecord]]) -> None:
        self._assembler = assembler
        self._found = found

    @classmethod
    def find(
        cls,
        assembler: Assembler,
        store: KVStore,
        count: int,
        chunks: Sequence[Chunk],
        records: Sequence[NodeRecord],
        keys: Container[str],
    ) -> Neighbours:
        """Choose up to `count` neighbours of each text: those that its chunk names, as far as known, else what stands before it.

        Parameters
        ----------
        assembler : Assembler
            Knows where names are, the encoding prefix and the model's window.
        store : KVStore
            Knows the chunks that were added before.
        count : int
            How many, at most; with 0 none is looked for.
        chunks, records : sequence of Chunk, of NodeRecord
            What one call adds, in its order, and what was made of it.
        keys : container of str
            The keys of the texts that are to be encoded; the others are not looked at.
        """
        fresh: dict[str, int] = {}
        for place, record in enumerate(records if count else ()):
            if record.key in keys:
                fresh.setdefault(record.key, place)
        known = {record.id: record for record in records if record.id}
        elsewhere = [id for place in fresh.values() for id in chunks[place].neighbours if id not in known]
        stored = store.lookup(assembler.namespace, elsewhere) if elsewhere else []
        known |= {record.id: record for record in stored if record is not None}
        found: dict[str, list[NodeRecord]] = {}
        for key, place in fresh.items():
            given = [known[id] for id in chunks[place].neighbours if id in known and known[id].key != key]
            # Documents are read from front to back: what a chunk refers to without naming it most likely stands before it.
            found[key] = given[-count:] or list(records[max(place - count, 0) : place])
            if not found[key]:
                others = (each for each in islice(records, place + 1, None) if each.key != key)
                found[key] = list(islice(others, count))
        return cls(assembler, found)

    def tokens(self, record: NodeRecord) -> list[int]:
        """Return the tokens that a chunk is measured behind, the last ones where the model's window has no room for all."""
        ids = [token for each in self._found.get(record.key, ()) for token in each.token_ids]
        return ids[len(ids) - self.num_tokens(record) :]

    def num_tokens(self, record: NodeRecord) -> int:
        """Return how many tokens a chunk is measured behind; 0 where it is not measured."""
        count = sum(len(each.token_ids) for each in self._found.get(record.key, ()))
        if self._assembler.window is None:
            return count
        return min(count, self._assembler.window - len(self._assembler.prefix_ids) - len(record.token_ids))
