"""Adding chunks: what is new is encoded and stored, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.codec import make_codec, pack_kv
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.jobs import AddJob, AddResult, Jobs
from cacheblend_rag.engine.neighbours import Neighbours
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.engine.writer import BatchWriter
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import num_neighbours
from cacheblend_rag.store import KVStore, NodeRecord

__all__ = ["Ingest", "WarmEstimate"]

Group = list[NodeRecord]
"""Records of one text, which share a key; never empty."""


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """What encoding some chunks would take: how many are not stored yet, their tokens, about how many bytes their KV has on disk,
    packed as the setting `disk_codec` says, and seconds, what is spent on measuring their sensitivity included.
    """

    chunks: int
    tokens: int
    kv_bytes: int
    seconds: float


@dataclass(slots=True)
class _Todo:
    """Chunks to add.

    Attributes
    ----------
    total : int
        How many.
    neighbours : Neighbours
        Behind what they are measured.
    records : list of NodeRecord
        Those whose names are not recorded exactly so, or whose KV is missing.
    groups : list of Group
        Texts that are to be encoded: their KV is missing, or is there and was not measured.
    held : list of str
        The keys of KV that is there.
    unmeasured : set of str
        Those of them that are to be measured.
    again : int
        Chunks that are encoded only for that.
    places : dict of (str, tuple of int or None)
        By key, where tokens stand when they are encoded.
    """

    total: int
    neighbours: Neighbours
    records: list[NodeRecord] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    places: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    unmeasured: set[str] = field(default_factory=set)
    again: int = 0

    @property
    def unchanged(self) -> int:
        return self.total - len(self.records) - self.again

    @property
    def finished(self) -> int:
        """Chunks for which nothing is encoded."""
        return self.total - sum(map(len, self.groups))


class Ingest:
    """Brings chunks into the store.

    Parameters
    ----------
    assembler : Assembler
        Tokenises chunks and knows where their names are.
    supply : KVSupply
        Computes KV.
    store : KVStore
        Where it is kept.
    decoder : Decoder or None
        The model, or None if it cannot be blended: chunks are then known by their tokens, and have no KV.
    config : BlendConfig
        Whose chunks they are, how long their KV lives, whether they are only named until they are retrieved, and behind how many
        others their sensitivity is measured.

    Attributes
    ----------
    neighbours : int
        Behind how many others each new chunk is measured; 0 where none is.
    """

    def __init__(
        self, assembler: Assembler, supply: KVSupply, store: KVStore, decoder: Decoder | None, config: BlendConfig
    ) -> None:
        self._assembler = assembler
        self._supply = supply
        self._store = store
        self._decoder = decoder
        self._tenant = config.namespace or ""
        self._ttl_s = config.ttl_s
        self._disk_codec = make_codec(config.disk_codec)
        self._names_only = config.encode_on == "second_use"
        # What has no KV, or gets it from a prompt, or cannot be compared behind other text, is never measured.
        is_measured = decoder is not None and decoder.is_movable and not self._names_only
        self.neighbours = num_neighbours(config) if is_measured else 0
        self._jobs = Jobs()

    def add(
        self, chunks: Iterable[Chunk], progress: Callable[[int, int], None] | None, ttl_s: float | None = None
    ) -> AddResult:
        """Encode and name what is not stored yet; see `BlendEngine.add`."""
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        todo = self._todo(chunks)
        self._store.prolong(todo.held, ttl_s)
        finished = todo.unchanged

        def advance(count: int) -> None:
            nonlocal finished
            finished += count
            if progress is not None:
                progress(finished, todo.total)

        advance(0)
        missing = {record.key for group in todo.groups for record in group}
        ready = [record for record in todo.records if record.key not in missing]
        self._name(ready)
        finished += len(ready)
        with BatchWriter() as writer:
            keep = partial(self._store_and_name, ttl_s=ttl_s)
            encoded, tokens = self._encode(todo, writer, keep, advance)
        return AddResult(encoded, len(todo.records), todo.unchanged, tokens)

    def add_later(
        self, chunks: Iterable[Chunk], progress: Callable[[int, int], None] | None, ttl_s: float | None = None
    ) -> AddJob:
        """Name what is not stored yet, and have it encoded in the background; see `BlendEngine.add`.

        The names come first: a chunk that is retrieved meanwhile is a miss, and one that is deleted or replaced meanwhile is seen
        to be no longer wanted, whatever process did it.
        """
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        todo = self._todo(chunks)
        self._store.prolong(todo.held, ttl_s)
        self._name(todo.records)
        job = AddJob(todo.finished, todo.total)

        def work(job: AddJob, writer: BatchWriter, given_up: Callable[[], bool]) -> AddResult:
            def advance(count: int) -> None:
                job.advance(count)
                if progress is not None:
                    progress(*job.progress)

            advance(0)
            encoded, tokens = self._encode(
                todo,
                writer,
                partial(self._store_if_wanted, ttl_s=ttl_s),
                advance,
                still=partial(self._wanted, unmeasured=todo.unmeasured),
                given_up=given_up,
            )
            return AddResult(encoded, len(todo.records), todo.unchanged, tokens)

        self._jobs.submit(job, work)
        return job

    def flush(self) -> None:
        """Wait for what was added in the background; see `BlendEngine.flush`."""
        self._jobs.flush()

    def close(self, wait: bool) -> None:
        """Wait for what was added in the background, or give it up."""
        self._jobs.close(wait)

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost; see `BlendEngine.estimate`."""
        todo = self._todo(chunks)
        texts = [group[0] for group in todo.groups]
        tokens = sum(len(record.token_ids) for record in texts)
        if self._decoder is None or not texts:
            return WarmEstimate(len(texts), tokens, 0, 0.0)
        before = [todo.neighbours.num_tokens(record) for record in texts]
        # One that is measured, where any is.
        count, longest = max(zip(before, texts, strict=True), key=lambda each: (each[0] > 0, len(each[1].token_ids)))
        share = tokens / len(longest.token_ids)
        started = time.perf_counter()
        [[(_, kv)]] = self._supply.encode([longest.token_ids], [todo.places[longest.key]])
        packed_bytes = pack_kv(kv, self._disk_codec).nbytes
        seconds = (time.perf_counter() - started) * share
        if count:
            started = time.perf_counter()
            self._supply.measure(kv, todo.neighbours.tokens(longest))
            measured = sum(more + len(record.token_ids) for more, record in zip(before, texts, strict=True) if more)
            seconds += (time.perf_counter() - started) * measured / (count + len(longest.token_ids))
        return WarmEstimate(len(texts), tokens, round(packed_bytes * share), seconds)

    def _todo(self, chunks: Iterable[Chunk]) -> _Todo:
        """Tokenise chunks and find out which are not stored exactly so, and whose KV is there all the same."""
        if isinstance(chunks, Chunk):
            raise ConfigError("chunks is a single Chunk; give a list of them, as in [Chunk(text, id)]")
        chunks = list(chunks)
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise ConfigError(f"{chunk!r} is a {type(chunk).__name__}; give Chunk objects, as in Chunk(text, id)")
        # Chunks without an id are all kept; of several with one id the last counts.
        wanted = list({(chunk.id if chunk.id is not None else object()): chunk for chunk in chunks}.values())
        # What was met as a miss is written first, so that it is not computed again.
        self._store.settle()
        names = [chunk.id for chunk in wanted if chunk.id is not None]
        known = dict(zip(names, self._store.lookup(self._assembler.namespace, names), strict=True))
        records = [self._assembler.record(chunk) for chunk in wanted]
        # Of a model without blending no KV is ever missing, nor where it is not computed before it is needed.
        held = (
            [True] * len(records)
            if self._decoder is None or self._names_only
            else self._store.holds([record.key for record in records], durable=True)
        )
        todo = _Todo(len(wanted), Neighbours(self._assembler, {}))
        groups: dict[str, Group] = {}
        for record, there in zip(records, held, strict=True):
            if there:
                todo.held.append(record.key)
            else:
                groups.setdefault(record.key, []).append(record)
            if not there or (record.id and known[record.id] != record):
                todo.records.append(record)
        # Misses of a prompt are stored without it; now that neighbours are known it can be measured.
        keys = list(dict.fromkeys(todo.held)) if self.neighbours else []
        lacking = {key for key, has in zip(keys, self._store.measured(keys), strict=True) if not has} if keys else set()
        searched = lacking.union(groups)
        todo.neighbours = Neighbours.find(self._assembler, self._store, self.neighbours, wanted, records, searched)
        for record in records:
            if record.key in lacking and todo.neighbours.num_tokens(record):
                todo.unmeasured.add(record.key)
                groups.setdefault(record.key, []).append(record)
                todo.again += not (record.id and known[record.id] != record)
        todo.groups = list(groups.values())
        todo.places = {record.key: self._assembler.places(chunk) for chunk, record in zip(wanted, records, strict=True)}
        return todo

    def _encode(
        self,
        todo: _Todo,
        writer: BatchWriter,
        keep: Callable[[Sequence[tuple[Group, ChunkKV]]], None],
        advance: Callable[[int], None],
        still: Callable[[Sequence[Group]], list[Group]] | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> tuple[int, int]:
        """Encode texts batch by batch, and measure them, while the writer stores the batch before.

        Parameters
        ----------
        todo : _Todo
            The texts.
        writer : BatchWriter
            Runs `keep`; nothing is left in it on return.
        keep : callable
            Stores a batch.
        advance : callable
            Called with the number of chunks that are finished since the last call.
        still : callable, optional
            Returns those texts of a batch that are still to be encoded.
        given_up : callable, optional
            Asked before each batch whether to stop.

        Returns
        -------
        encoded, tokens : int
            How many texts were encoded, and their tokens.
        """
        encoded = tokens = storing = 0
        groups, patient = todo.groups, still is not None
        placed = [todo.places[group[0].key] is not None for group in groups]
        for batch in self._supply.plan([len(group[0].token_ids) for group in groups], placed) if groups else ():
            if given_up is not None and given_up():
                break
            chosen = planned = [groups[index] for index in batch]
            if still is not None:
                chosen = still(planned)
            skipped = sum(map(len, planned)) - sum(map(len, chosen))
            if skipped:
                advance(skipped)
            # Planned again, texts of one batch are one batch still.
            places = [todo.places[group[0].key] for group in chosen]
            for part in self._supply.encode([group[0].token_ids for group in chosen], places, patient=patient):
                fresh = [(chosen[index], self._measured(chosen[index][0], kv, todo, patient)) for index, kv in part]
                writer.drain()
                if storing:
                    advance(storing)
                writer.submit(partial(keep, fresh))
                storing = sum(len(group) for group, _ in fresh)
                encoded += len(fresh)
                tokens += sum(len(kv.token_ids) for _, kv in fresh)
                # Once it is stored, nothing should keep a batch in memory while the next is computed.
                del part, fresh
        writer.drain()
        if storing:
            advance(storing)
        return encoded, tokens

    def _measured(self, record: NodeRecord, kv: ChunkKV, todo: _Todo, patient: bool) -> ChunkKV:
        """Return KV with its sensitivity, or as it is where it stands behind nothing."""
        before = todo.neighbours.tokens(record)
        return self._supply.measure(kv, before, patient=patient) if before else kv

    def _store_and_name(self, batch: Sequence[tuple[Group, ChunkKV]], ttl_s: float | None) -> None:
        evictions = self._store.evictions
        for group, kv in batch:
            self._store.put(group[0].key, kv, tenant=self._tenant, ttl_s=ttl_s)
        # Named only now: a process that dies before leaves KV without a name, which the next run finds.
        self._name(record for group, _ in batch for record in group)
        # Until it had its own name, KV could lose the last of its others. What made room for the batch's own is not put again.
        if self._store.evictions != evictions:
            return
        held = self._store.holds([group[0].key for group, _ in batch])
        for (group, kv), there in zip(batch, held, strict=True):
            if not there and any(record.id for record in group):
                self._store.put(group[0].key, kv, tenant=self._tenant, ttl_s=ttl_s)

    def _store_if_wanted(self, batch: Sequence[tuple[Group, ChunkKV]], ttl_s: float | None) -> None:
        for group, kv in batch:
            self._store.put(group[0].key, kv, tenant=self._tenant, ttl_s=ttl_s)
        groups = [group for group, _ in batch]
        named = self._named(groups)
        gone = [group[0].key for group, still in zip(groups, named, strict=True) if not still]
        if gone:
            # Deleted or replaced while it was encoded.
            self._store.release(gone)

    def _wanted(self, groups: Sequence[Group], unmeasured: Container[str]) -> list[Group]:
        """Return the texts that were neither deleted nor replaced since they were added, nor encoded for a prompt.

        Of what is to be measured it does not matter that it is held.
        """
        held = self._store.holds([group[0].key for group in groups])
        named = self._named(groups)
        return [
            group
            for group, there, still in zip(groups, held, named, strict=True)
            if still and (not there or group[0].key in unmeasured)
        ]

    def _named(self, groups: Sequence[Group]) -> list[bool]:
        """Return of each text whether one of its records stands, or has no id by which it could have been deleted."""
        names = [record.id for group in groups for record in group if record.id]
        known = dict(zip(names, self._store.lookup(self._assembler.namespace, names), strict=True))
        return [any(not record.id or known[record.id] == record for record in group) for group in groups]

    def _name(self, records: Iterable[NodeRecord]) -> None:
        named = [record for record in records if record.id]
        self._store.name(self._assembler.namespace, named, tenant=self._tenant)
