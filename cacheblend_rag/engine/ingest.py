"""Adding chunks: what is new is encoded and stored, batch by batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.codec import make_codec, pack_kv
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddJob, AddResult, BatchWriter, Jobs
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.model import Decoder
from cacheblend_rag.store import KVStore, NamedTarget, NodeRecord

__all__ = ["Ingest", "WarmEstimate"]

logger = logging.getLogger(__name__)

Group = list[NamedTarget]
"""Chunks that share a key; never empty."""


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """What encoding some chunks would take: how many are not stored yet, their tokens, about how many bytes their KV has on disk,
    packed as the setting `disk_codec` says, and seconds.
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
    given : list of NamedTarget
        The chunks.
    names : list of NamedTarget
        Those whose names are not recorded exactly so.
    lacking : int
        Those whose names are, and whose KV is missing.
    groups : list of Group
        What is to be encoded. Chunks of the documents that have another context from now on are among them.
    held : list of NamedTarget
        What has its KV.
    positions : dict of (str, tuple of int or None)
        By key, where tokens stand when they are encoded.
    """

    given: list[NamedTarget]
    names: list[NamedTarget] = field(default_factory=list)
    lacking: int = 0
    groups: list[Group] = field(default_factory=list)
    held: list[NamedTarget] = field(default_factory=list)
    positions: dict[str, tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many chunks there are."""
        return len(self.given)

    @property
    def changed(self) -> int:
        """Chunks that are named, or whose KV was missing."""
        return len(self.names) + self.lacking

    @property
    def unchanged(self) -> int:
        """Chunks that are stored exactly so."""
        return self.total - self.changed

    @property
    def ready(self) -> int:
        """Chunks for which nothing is encoded."""
        waiting = {group[0].record.key for group in self.groups}
        return sum(target.record.key not in waiting for target in self.given)

    @property
    def steps(self) -> int:
        """How many chunks there are, with those of their documents that are encoded again."""
        return self.ready + sum(map(len, self.groups))

    def target(self, group: Group) -> Target:
        """Return what is encoded for a group."""
        record = group[0].record
        return Target(record.token_ids + record.separator, group[0].context, self.positions.get(record.key))


class _Naming:
    """Names chunks once their KV is stored, all chunks of a document together.

    Parameters
    ----------
    todo : _Todo
        The chunks.
    """

    def __init__(self, todo: _Todo) -> None:
        self._names: dict[str, list[NodeRecord]] = {}
        self._waits: dict[str, set[str]] = {}
        self._units: dict[str, list[str]] = {}
        for target in todo.names:
            self._names.setdefault(_unit(target), []).append(target.record)
        for group in todo.groups:
            units = list(dict.fromkeys(_unit(target) for target in group))
            self._units[group[0].record.key] = units
            for unit in units:
                self._waits.setdefault(unit, set()).add(group[0].record.key)

    def ready(self, keys: Iterable[str] = ()) -> list[NodeRecord]:
        """Return the records that can be named now that these keys are stored, each once."""
        for key in keys:
            for unit in self._units.get(key, ()):
                self._waits[unit].discard(key)
        units = [unit for unit in self._names if not self._waits.get(unit)]
        return [record for unit in units for record in self._names.pop(unit)]


def _shorter(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two lives, of which None never ends."""
    return min((life for life in (one, other) if life is not None), default=None)


def _unit(target: NamedTarget) -> str:
    return f"key {target.record.key}" if target.document is None else f"document {target.document}"


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
    config : EngineConfig
        Whose chunks they are, how long their KV lives, and whether they are only named until they are retrieved.
    """

    def __init__(
        self, assembler: Assembler, supply: KVSupply, store: KVStore, decoder: Decoder | None, config: EngineConfig
    ) -> None:
        self._assembler = assembler
        self._supply = supply
        self._store = store
        self._decoder = decoder
        self._tenant = config.tenant or ""
        self._ttl_s = config.ttl_s
        self._disk_codec = make_codec(config.disk_codec)
        self._names_only = config.encode_on == "second_use"
        self._jobs = Jobs()

    def add(
        self, chunks: Iterable[Chunk], progress: Callable[[int, int], None] | None, ttl_s: float | None = None
    ) -> AddResult:
        """Encode and name what is not stored yet; see `BlendEngine.add`."""
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        todo = self._todo(chunks, ttl_s)
        self._prolong(todo.held)
        naming = _Naming(todo)
        finished = todo.unchanged

        def advance(count: int) -> None:
            nonlocal finished
            finished += count
            if progress is not None:
                progress(finished, todo.steps)

        advance(0)
        self._name(naming.ready(), ttl_s)
        finished = todo.ready
        keep = partial(self._store_and_name, naming=naming, ttl_s=ttl_s)
        encoded, tokens = self._encode(todo, keep, advance)
        # Behind what has been changed by another process since, no name stands by now.
        self._release([group for group in todo.groups if all(target.record.id for target in group)])
        return AddResult(encoded, todo.changed, todo.unchanged, tokens)

    def add_later(
        self, chunks: Iterable[Chunk], progress: Callable[[int, int], None] | None, ttl_s: float | None = None
    ) -> AddJob:
        """Name what is not stored yet, and have it encoded in the background; see `BlendEngine.add`.

        The names come first: a chunk that is retrieved meanwhile is a miss, and one that is deleted or replaced meanwhile is seen
        to be no longer wanted, whatever process did it.
        """
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        todo = self._todo(chunks, ttl_s)
        self._prolong(todo.held)
        self._name([target.record for target in todo.names], ttl_s)
        return self._later(todo, progress, self._store_if_wanted)

    def encode_later(self, ids: Sequence[str]) -> None:
        """Have chunks that are named encoded in the background, as far as their KV is still missing then.

        It is no matter if that fails: they are misses, as they were.

        Parameters
        ----------
        ids : sequence of str
            The chunks.
        """
        targets = [target for target in self._store.targets(self._assembler.namespace, ids) if target is not None]
        todo = _Todo(targets)
        todo.groups = [[target] for target in {target.record.key: target for target in targets}.values()]
        try:
            self._later(todo, None, self._store_quietly)
        except ConfigError as error:
            logger.debug("not encoded in the background: %s", error)

    def _later(
        self,
        todo: _Todo,
        progress: Callable[[int, int], None] | None,
        keep: Callable[[Sequence[tuple[Group, ChunkKV]]], None],
    ) -> AddJob:
        job = AddJob(todo.ready, todo.steps)

        def work(job: AddJob, given_up: Callable[[], bool]) -> AddResult:
            def advance(count: int) -> None:
                job.advance(count)
                if progress is not None:
                    progress(*job.progress)

            advance(0)
            encoded, tokens = self._encode(todo, keep, advance, still=self._wanted, given_up=given_up)
            return AddResult(encoded, todo.changed, todo.unchanged, tokens)

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
        todo = self._todo(chunks, self._ttl_s)
        texts = [group[0].record for group in todo.groups]
        tokens = sum(len(record.token_ids) for record in texts)
        if self._decoder is None or not texts:
            return WarmEstimate(len(texts), tokens, 0, 0.0)
        longest = max(texts, key=lambda record: len(record.token_ids))
        started = time.perf_counter()
        sample = Target(longest.token_ids, positions=todo.positions.get(longest.key))
        [[(_, kv)]] = self._supply.encode([sample])
        packed_bytes = pack_kv(kv, self._disk_codec).nbytes
        computed = self._supply.num_tokens([todo.target(group) for group in todo.groups])
        seconds = (time.perf_counter() - started) * computed / len(longest.token_ids)
        kept = sum(len(record.token_ids + record.separator) for record in texts)
        return WarmEstimate(len(texts), tokens, round(packed_bytes * kept / len(longest.token_ids)), seconds)

    def _todo(self, chunks: Iterable[Chunk], ttl_s: float | None) -> _Todo:
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
        records = [self._assembler.record(chunk) for chunk in wanted]
        positions = {record.key: self._assembler.places(chunk) for chunk, record in zip(wanted, records, strict=True)}
        targets = self._store.rehearse(self._assembler.namespace, records, rules=self._assembler.rules, ttl_s=ttl_s)
        given = targets[: len(records)]
        todo = _Todo(given, positions=positions)
        todo.names = [target.placed(record) for target, record in zip(given, records, strict=True) if target.is_changed]
        # Of a model without blending no KV is ever missing, nor where it is not computed before it is needed.
        held = (
            [True] * len(targets)
            if self._decoder is None or self._names_only
            else self._store.holds([target.record.key for target in targets], durable=True)
        )
        groups: dict[str, Group] = {}
        for number, (target, there) in enumerate(zip(targets, held, strict=True)):
            if there:
                todo.held.append(target)
            else:
                groups.setdefault(target.record.key, []).append(target)
                todo.lacking += number < len(given) and not target.is_changed
        todo.groups = list(groups.values())
        return todo

    def _encode(
        self,
        todo: _Todo,
        keep: Callable[[Sequence[tuple[Group, ChunkKV]]], None],
        advance: Callable[[int], None],
        still: Callable[[Sequence[Group]], list[Group]] | None = None,
        given_up: Callable[[], bool] | None = None,
    ) -> tuple[int, int]:
        """Encode texts batch by batch while the writer stores the batch before.

        Parameters
        ----------
        todo : _Todo
            The texts.
        keep : callable
            Stores a batch, while the next one is computed.
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
        with BatchWriter() as writer:
            for batch in self._supply.plan([todo.target(group) for group in groups]) if groups else ():
                if given_up is not None and given_up():
                    break
                chosen = planned = [groups[index] for index in batch]
                if still is not None:
                    chosen = still(planned)
                skipped = sum(map(len, planned)) - sum(map(len, chosen))
                if skipped:
                    advance(skipped)
                # Planned again, what is left of one batch is one batch, or a few.
                for part in self._supply.encode([todo.target(group) for group in chosen], patient=patient):
                    fresh = [(chosen[index], kv) for index, kv in part]
                    writer.drain()
                    if storing:
                        advance(storing)
                    writer.submit(partial(keep, fresh))
                    storing = sum(len(group) for group, _ in fresh)
                    encoded += len(fresh)
                    tokens += sum(len(group[0].record.token_ids) for group, _ in fresh)
                    # Once it is stored, nothing should keep a batch in memory while the next is computed.
                    del part, fresh
            writer.drain()
        if storing:
            advance(storing)
        return encoded, tokens

    def _store_and_name(self, batch: Sequence[tuple[Group, ChunkKV]], naming: _Naming, ttl_s: float | None) -> None:
        evictions = self._store.evictions
        self._put(batch)
        # Named only now: a process that dies before leaves KV without a name, which the next run finds.
        self._name(naming.ready(group[0].record.key for group, _ in batch), ttl_s)
        # Until it had its own name, KV could lose the last of its others. What made room for the batch's own is not put again.
        if self._store.evictions != evictions:
            return
        held = self._store.holds([group[0].record.key for group, _ in batch])
        self._put(
            [
                (group, kv)
                for (group, kv), there in zip(batch, held, strict=True)
                if not there and any(target.record.id for target in group)
            ]
        )

    def _store_if_wanted(self, batch: Sequence[tuple[Group, ChunkKV]]) -> None:
        self._put_late(batch, is_asked_for=False)
        # Deleted or replaced while it was encoded.
        self._release([group for group, _ in batch])

    def _release(self, groups: Sequence[Group]) -> None:
        """Drop the KV that no name leads to, of groups that are named."""
        named = self._named(groups)
        gone = [group[0].record.key for group, still in zip(groups, named, strict=True) if not still]
        if gone:
            self._store.release(gone)

    def _put_late(self, batch: Sequence[tuple[Group, ChunkKV]], is_asked_for: bool) -> None:
        """Store KV whose names were recorded before it was encoded, to live as long as is left in their documents by now.

        Where all lives have ended meanwhile, only what was asked for is stored, like any miss.
        """
        ids = [target.record.id for group, _ in batch for target in group if target.document is not None]
        known = self._store.targets(self._assembler.namespace, ids) if ids else []
        lives = {target.record.id: target.lives_s for target in known if target is not None}
        for group, kv in batch:
            left = []
            for target in group:
                now = lives.get(target.record.id, target.lives_s)
                if is_asked_for:
                    left.append(replace(target, lives_s=_shorter(now, self._ttl_s)))
                elif now is not None or target.lives_s is None:
                    left.append(replace(target, lives_s=_shorter(now, target.lives_s)))
            if left:
                self._put([(left, kv)])

    def _store_quietly(self, batch: Sequence[tuple[Group, ChunkKV]]) -> None:
        try:
            self._put_late(batch, is_asked_for=True)
            self._release([group for group, _ in batch])
        except StoreError as error:
            logger.warning("the KV of misses was not stored: %s", error)

    def _put(self, batch: Iterable[tuple[Group, ChunkKV]]) -> None:
        for group, kv in batch:
            lives = [target.lives_s for target in group]
            ttl_s = None if None in lives else max(life for life in lives if life is not None)
            self._store.put(group[0].record.key, kv, tenant=self._tenant, ttl_s=ttl_s)

    def _prolong(self, held: Iterable[NamedTarget]) -> None:
        """Let KV that is there live as long as what is added now, and all that it was encoded behind."""
        keys: dict[float | None, list[str]] = {}
        for target in held:
            keys.setdefault(target.lives_s, []).append(target.record.key)
        for ttl_s, each in keys.items():
            self._store.prolong(each, ttl_s)

    def _wanted(self, groups: Sequence[Group]) -> list[Group]:
        """Return the texts that were neither deleted nor replaced since they were added, nor encoded for a prompt."""
        held = self._store.holds([group[0].record.key for group in groups])
        named = self._named(groups)
        return [group for group, there, still in zip(groups, held, named, strict=True) if still and not there]

    def _named(self, groups: Sequence[Group]) -> list[bool]:
        """Return of each text whether one of its records stands, or has no id by which it could have been deleted."""
        names = [target.record.id for group in groups for target in group if target.record.id]
        known = dict(zip(names, self._store.lookup(self._assembler.namespace, names), strict=True))
        return [
            any(not target.record.id or known[target.record.id] == target.record for target in group)
            for group in groups
        ]

    def _name(self, records: Iterable[NodeRecord], ttl_s: float | None) -> None:
        named = [record for record in records if record.id]
        rules = self._assembler.rules
        self._store.name(self._assembler.namespace, named, tenant=self._tenant, rules=rules, ttl_s=ttl_s)
