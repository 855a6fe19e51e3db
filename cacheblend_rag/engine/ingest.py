"""Adding chunks: what is new is encoded and stored, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.prompt import Assembler
from cacheblend_rag.engine.run import Runner
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import Decoder
from cacheblend_rag.store import KVStore, NodeRecord

__all__ = ["AddResult", "Ingest", "WarmEstimate"]


@dataclass(frozen=True, slots=True)
class AddResult:
    """What `BlendEngine.add` did.

    Attributes
    ----------
    encoded : int
        Texts whose KV was computed.
    named : int
        Chunks that are new, or whose text is; more than were encoded where texts recur or their KV was there already.
    unchanged : int
        Chunks that were stored exactly so.
    tokens : int
        Tokens encoded.
    """

    encoded: int
    named: int
    unchanged: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """What encoding some chunks would take: how many are not stored yet, their tokens, bytes of KV, and seconds."""

    chunks: int
    tokens: int
    kv_bytes: int
    seconds: float


class Ingest:
    """Brings chunks into the store.

    Parameters
    ----------
    assembler : Assembler
        Tokenises chunks and knows where their names are.
    runner : Runner
        Computes KV.
    store : KVStore
        Where it is kept.
    decoder : Decoder or None
        The model, or None if it cannot be blended: chunks are then known by their tokens, and have no KV.
    config : BlendConfig
        Whose chunks they are, and how long their KV lives.
    """

    def __init__(
        self, assembler: Assembler, runner: Runner, store: KVStore, decoder: Decoder | None, config: BlendConfig
    ) -> None:
        self._assembler = assembler
        self._runner = runner
        self._store = store
        self._decoder = decoder
        self._tenant = config.namespace or ""
        self._ttl_s = config.ttl_s

    def add(
        self, chunks: Iterable[Chunk], progress: Callable[[int, int], None] | None, ttl_s: float | None = None
    ) -> AddResult:
        """Encode and name what is not stored yet; see `BlendEngine.add`."""
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        chunks = list(chunks)
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise ConfigError(f"{chunk!r} is a {type(chunk).__name__}; give Chunk objects, as in Chunk(text, id)")
        # Chunks without an id are all kept; of several with one id the last counts.
        wanted = list({(chunk.id if chunk.id is not None else object()): chunk for chunk in chunks}.values())
        todo, held = self._missing(wanted)
        self._store.prolong(held, ttl_s)
        done = len(wanted) - len(todo)
        if progress is not None:
            progress(done, len(wanted))
        missing: dict[str, list[NodeRecord]] = {}
        ready = []
        for record, there in todo:
            if there:
                ready.append(record)
            else:
                missing.setdefault(record.key, []).append(record)
        self._name(ready)
        done += len(ready)
        groups = list(missing.values())
        tokens = 0
        for batch in self._runner.encode([group[0].token_ids for group in groups]) if groups else ():
            for index, kv in batch:
                self._store.put(groups[index][0].key, kv, tenant=self._tenant, ttl_s=ttl_s)
                tokens += len(kv.token_ids)
            named = [record for index, _ in batch for record in groups[index]]
            # Named only now: a process that dies before leaves KV without a name, which the next run finds.
            self._name(named)
            done += len(named)
            if progress is not None:
                progress(done, len(wanted))
        return AddResult(len(groups), len(todo), len(wanted) - len(todo), tokens)

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost; see `BlendEngine.estimate`."""
        todo = {record.key: record for record, held in self._missing(list(chunks))[0] if not held}
        tokens = sum(len(record.token_ids) for record in todo.values())
        if self._decoder is None or not todo:
            return WarmEstimate(len(todo), tokens, 0, 0.0)
        longest = max((record.token_ids for record in todo.values()), key=len)
        started = time.perf_counter()
        for _ in self._runner.encode([longest]):
            pass
        seconds = (time.perf_counter() - started) / len(longest) * tokens
        return WarmEstimate(len(todo), tokens, tokens * self._decoder.kv_bytes_per_token, seconds)

    def _missing(self, chunks: Sequence[Chunk]) -> tuple[list[tuple[NodeRecord, bool]], list[str]]:
        """Return the records of those chunks that are not stored exactly so, and whether their KV is there all the same; and the
        keys of all KV that is there.
        """
        # What was met as a miss is written first, so that it is not computed again.
        self._store.settle()
        names = [chunk.id for chunk in chunks if chunk.id is not None]
        known = dict(zip(names, self._store.lookup(self._assembler.namespace, names), strict=True))
        records = [self._assembler.record(chunk) for chunk in chunks]
        # Of a model without blending no KV is ever missing.
        held = (
            [True] * len(records)
            if self._decoder is None
            else self._store.holds([each.key for each in records], durable=True)
        )
        missing = [
            (record, there)
            for record, there in zip(records, held, strict=True)
            if not there or (record.id and known[record.id] != record)
        ]
        return missing, [record.key for record, there in zip(records, held, strict=True) if there]

    def _name(self, records: Iterable[NodeRecord]) -> None:
        named = [record for record in records if record.id]
        self._store.name(self._assembler.namespace, named, tenant=self._tenant)
