"""Adding chunks: names are recorded, and what they lack of KV is encoded and stored batch by batch, here or in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.codec import make_codec, pack_kv
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import BackendError, ConfigError, PromptError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.report import AddResult, WarmEstimate
from cacheblend_rag.store import KVStore, NodeRecord
from cacheblend_rag.store.chunkfile import encode_chunk

__all__ = ["AddJob", "Ingest", "Jobs"]

logger = logging.getLogger(__name__)

# Batches that are planned together: of more, chunks are whole later; of fewer, more is read twice.
_TOGETHER = 4
# For an estimate texts, more and more of them, are tried for this long.
_TRIAL_S = 1.0

_LOGGED_S = 5.0

OnRefused = Callable[[Chunk, PromptError], None]


class AddJob:
    """Chunks that `BlendEngine.add` encodes in the background.

    Attributes
    ----------
    progress : tuple of int
        How many chunks are finished, and how many there are.
    """

    def __init__(self, finished: int, total: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.progress = (finished, total)
        self._on_progress = on_progress
        self._started = self._logged = time.monotonic()
        self._future: Future[AddResult] = Future()

    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> AddResult:
        """Wait for the end of the work, at most `timeout_s` seconds, and return what was done.

        Raises
        ------
        CacheBlendError
            What went wrong, a `StoreError` most likely; what was stored until then stays.
        TimeoutError
            If the work goes on after `timeout_s` seconds.
        """
        futures.wait([self._future], timeout_s)
        if not self.done():
            finished, total = self.progress
            raise TimeoutError(f"{finished} of {total} chunks are encoded after {timeout_s} s; wait longer")
        return self._future.result()

    def advance(self, count: int) -> None:
        """Note that that many more chunks are finished."""
        if count:
            finished, total = self.progress
            self.progress = (finished + count, total)
            self.tell()

    def tell(self) -> None:
        """Call `on_progress`, and log how far it is if that was not done for five seconds."""
        if (now := time.monotonic()) - self._logged > _LOGGED_S:
            self._logged = now
            logger.info("%d of %d chunks encoded after %.0f s", *self.progress, now - self._started)
        if self._on_progress is not None:
            self._on_progress(*self.progress)


Work = Callable[[Callable[[], bool]], AddResult]
"""Does a job, asking between batches whether to give up."""


class Jobs:
    """Jobs of one engine, done one after the other by a thread of their own; an interpreter that ends waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "cacheblend-encoder")
        self._lock = threading.Lock()
        # Those that are not done, or whose error is still to be told.
        self._jobs: list[AddJob] = []
        self._giving_up = False

    def submit(self, job: AddJob, work: Work) -> AddJob:
        """Put a job at the end of the queue, and return it."""
        with self._lock:
            self._jobs = [each for each in self._jobs if not each.done() or each._future.exception()]
            try:
                job._future = self._pool.submit(self._do, job, work)
            except RuntimeError:
                raise ConfigError("this engine is closed; make a new one") from None
            self._jobs.append(job)
        return job

    def flush(self) -> None:
        """Wait for the jobs that were submitted before, and raise the first error since the last flush."""
        failed = self._take_failed()
        _warn_of(failed[1:])
        if failed:
            raise failed[0]

    def close(self, wait: bool) -> None:
        """Take no more jobs and wait for those there are, or give them up after the batch under way."""
        self._giving_up = self._giving_up or not wait
        self._pool.shutdown()
        _warn_of(self._take_failed())

    def _take_failed(self) -> list[BaseException]:
        """Wait for the jobs there are, and return the errors of those that no other thread has told."""
        waiting = list(self._jobs)
        futures.wait([job._future for job in waiting])
        with self._lock:
            ended = [each for each in waiting if each in self._jobs]
            self._jobs = [each for each in self._jobs if each not in waiting]
        return [error for job in ended if (error := job._future.exception()) is not None]

    def _do(self, job: AddJob, work: Work) -> AddResult:
        result = None if self._giving_up else work(lambda: self._giving_up)
        finished, total = job.progress
        if result is None or (self._giving_up and finished < total):
            raise ConfigError(
                f"the engine was closed when {finished} of {total} chunks were encoded; the others are encoded when they "
                "are retrieved"
            )
        return result


def _warn_of(failed: list[BaseException]) -> None:
    for error in failed:
        logger.warning("chunks added in the background were not stored: %s", error)


@dataclass(slots=True)
class _Text:
    """KV to be computed, and the ids of the chunks (one at least) whose it is."""

    key: str
    target: Target
    # Of the chunk, without what separates it from the next; 0 where it is counted as encoded with its other KV.
    num_tokens: int
    ids: list[str] = field(default_factory=list)


Batch = Sequence[tuple[_Text, ChunkKV]]


class _Work:
    """Texts of named chunks to be encoded and stored, how far that is, and what could not be encoded."""

    def __init__(self, texts: Sequence[_Text], num_chunks: int, progress: Callable[[int, int], None] | None = None):
        self.texts = texts
        # How many texts each chunk still waits for.
        self.waits = Counter(id for text in texts for id in text.ids)
        self.job = AddJob(num_chunks - len(self.waits), num_chunks, progress)
        self.failures: list[Exception] = []

    def finish(self, texts: Iterable[_Text]) -> None:
        """Note that texts are stored, or not wanted any more."""
        ids = [id for text in texts for id in text.ids]
        self.waits.subtract(ids)
        self.job.advance(sum(not self.waits[id] for id in set(ids)))


def _warn_of_twins(added: Sequence[NodeRecord], members: Mapping[str, Sequence[NodeRecord]]) -> None:
    """Warn where chunks stand in their documents already, at the same place, under other ids."""
    places = Counter((name, each.start, each.key) for name, those in members.items() for each in those)
    twins = [each for each in added if each.start is not None and places[each.document or "", each.start, each.key] > 1]
    if twins:
        logger.warning(
            "%d of %d chunks (%r is one) are in their documents a second time, at the same place under another id, so that a "
            "retriever finds each twice; open the index that is there instead of adding documents again, or give the same ids",
            len(twins),
            len(added),
            twins[0].id,
        )


class Ingest:
    """Brings chunks into the store; of a model that cannot be blended they are known by their tokens, and have no KV."""

    def __init__(self, assembler: Assembler, supply: KVSupply, store: KVStore, config: EngineConfig) -> None:
        self._assembler, self._supply, self._store, self._config = assembler, supply, store, config
        self._namespace, self._tenant = supply.namespace, supply.tenant
        self.jobs = Jobs()

    def add(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int, int], None] | None,
        on_refused: OnRefused | None,
        background: bool,
        whole: bool,
        gone: Sequence[str],
    ) -> AddResult | AddJob:
        """Name chunks, then encode and store what they lack, here or in the background; see `BlendEngine.add`."""
        # What was met as a miss is written first, so that it is not computed again.
        self._store.settle()
        # Of several with one id the last counts.
        by_id = {str(chunk.id): chunk for chunk in chunks}
        given = self._records(by_id.values(), on_refused)
        # Names come first: whoever is killed leaves misses.
        try:
            named, changed = self._store.name(self._namespace, list(given.values()), tenant=self._tenant, whole=whole)
        except BaseException:
            # No id stands for an earlier text any more.
            with suppress(StoreError):
                known = self._store.names.lookup(self._namespace, list(by_id))
                others = [each.id for each in known if each is not None and each != given.get(each.id)]
                self._store.forget(self._namespace, others)
            raise
        self._store.forget(self._namespace, [id for id in by_id if id not in given])
        gone = [id for id in gone if id not in by_id]
        if self._config.companions == "similar":
            # Chunks of any document are companions: these must not be.
            self._store.forget(self._namespace, gone)
        positions = {given[id].key: self._assembler.places(by_id[id]) for id in given if by_id[id].positions}
        work = self._work(named, positions, progress, warns=True, gone=gone)
        self._store.forget(self._namespace, gone)
        count = len(changed | work.waits.keys())
        result = AddResult(0, count, len(named) - count, 0)
        if background:
            return self.jobs.submit(work.job, partial(self._encode, work, result))
        result = self._encode(work, result, on_refused=on_refused)
        for id, waits in work.waits.items():
            if waits and on_refused is not None:
                why = f"chunk {id!r} has no KV: it could not be encoded: {work.failures[0]}"
                on_refused(by_id[id], PromptError(why))
        return result

    def encode_later(self, ids: Sequence[str]) -> None:
        """Have named chunks encoded in the background, as far as their KV is missing then; where that fails they stay misses."""

        def encode(given_up: Callable[[], bool]) -> AddResult:
            try:
                return self._encode(work, AddResult(0, 0, 0, 0), given_up)
            except Exception as error:
                logger.warning("the KV of misses was not stored: %s", error)
                return AddResult(0, 0, 0, 0)

        try:
            known = self._store.names.lookup(self._namespace, ids)
            # What a prompt places itself has KV for its own place.
            named = [each for each in known if each is not None and not self._assembler.is_placed(each)]
            work = self._work(named, {})
            self.jobs.submit(work.job, encode)
        except (ConfigError, StoreError) as error:
            logger.debug("not encoded in the background: %s", error)

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost, by encoding a few of its texts; see `BlendEngine.estimate`."""
        self._store.settle()
        given = self._records({chunk.id: chunk for chunk in chunks}.values(), lambda chunk, error: None)
        known = {each.id: each for each in self._store.names.lookup(self._namespace, list(given)) if each is not None}
        records = [known[id] if known.get(id) == each else each for id, each in given.items()]
        documents: dict[str, list[NodeRecord]] = {}
        for each in sorted(records, key=lambda each: (each.start is None, each.start or 0)):
            documents.setdefault(each.document or "", []).append(each)
        documents.pop("", None)
        texts = self._missing(self._with_later(records, documents), {})
        counted = [text.num_tokens for text in texts if text.num_tokens]
        return WarmEstimate(len(counted), sum(counted), *self._measure(texts))

    def _records(self, chunks: Iterable[Chunk], on_refused: OnRefused | None) -> dict[str, NodeRecord]:
        """Return by its id the record of each chunk; what cannot be served is told, or raised."""
        records: dict[str, NodeRecord] = {}
        for chunk in chunks:
            try:
                record = self._assembler.record(chunk)
                records[record.id] = record
            except PromptError as error:
                if on_refused is None:
                    raise
                on_refused(chunk, error)
        return records

    def _work(
        self,
        named: Sequence[NodeRecord],
        positions: Mapping[str, tuple[int, ...] | None],
        progress: Callable[[int, int], None] | None = None,
        *,
        warns: bool = False,
        gone: Collection[str] = (),
    ) -> _Work:
        """Choose what named chunks are read behind, where it is still to be, note it, and return what KV they lack."""
        documents = {each.document for each in named if each.document is not None and each.later is None}
        members = {
            name: [each for each in self._store.names.members(self._namespace, name) if each.id not in gone]
            for name in documents
        }
        if warns:
            _warn_of_twins([each for each in named if each.later is None], members)
        records = self._with_later(named, members, positions)
        both = zip(records, named, strict=True)
        laters = {new.id: new.later for new, old in both if new.later is not None and old.later is None}
        self._store.choose(self._namespace, laters)
        return _Work(self._missing(records, positions), len(records), progress)

    def _with_later(
        self, records: Sequence[NodeRecord], documents: Mapping[str, Sequence[NodeRecord]], placed: Container[str] = ()
    ) -> list[NodeRecord]:
        """Return records with what they are read behind chosen, where it is still to be.

        What a prompt places has no such KV: it has positions of its own, or its key is among the `placed`.
        """
        companions = self._assembler.companions
        if companions is None:
            return list(records)
        waiting = [
            each
            for each in records
            if each.later is None and each.key not in placed and not self._assembler.is_placed(each)
        ]
        chosen = companions.choose(waiting, documents)
        laters = {each.id: later for each, later in zip(waiting, chosen, strict=True)}
        return [replace(each, later=laters.get(each.id, each.later)) for each in records]

    def _missing(self, records: Sequence[NodeRecord], positions: Mapping[str, tuple[int, ...] | None]) -> list[_Text]:
        """Return what is to be computed: of each chunk the KV that is not stored."""
        if not self._supply.encodes:
            # Of a model without blending no KV is ever missing.
            return []
        keys = list(dict.fromkeys(key for record in records for key in record.keys))
        lacking = {key for key, held in zip(keys, self._store.holds(keys, durable=True), strict=True) if not held}
        texts: dict[str, _Text] = {}
        for record in records:
            for key in filter(lacking.__contains__, dict.fromkeys(record.keys)):
                behind = record.later.behind if record.later is not None and key == record.later.key else ()
                target = Target(record.token_ids + record.separator, behind, positions.get(key))
                texts.setdefault(key, _Text(key, target, len(record.token_ids))).ids.append(record.id)
        counted = set[str]()
        for text in texts.values():
            text.num_tokens *= counted.isdisjoint(text.ids)
            counted.update(text.ids)
        return list(texts.values())

    def _encode(
        self,
        work: _Work,
        result: AddResult,
        given_up: Callable[[], bool] | None = None,
        on_refused: OnRefused | None = None,
    ) -> AddResult:
        """Encode texts batch by batch, while the batch before is stored in a thread; in the background until it is given up."""
        encoded = tokens = 0
        storing, stored = Future[None](), list[_Text]()
        storing.set_result(None)
        work.job.tell()
        with ThreadPoolExecutor(1, "cacheblend-writer") as writer:
            for batch in self._computed(work, given_up):
                storing.result()
                work.finish(stored)
                stored = [text for text, _ in batch]
                encoded += sum(text.num_tokens > 0 for text in stored)
                tokens += sum(text.num_tokens for text in stored)
                try:
                    storing = writer.submit(self._keep, batch)
                except RuntimeError:
                    # Python ends, and starts no threads any more.
                    self._keep(batch)
                # Once it is stored, nothing should keep a batch in memory while the next is computed.
                del batch
            storing.result()
        work.finish(stored)
        if work.failures and on_refused is None:
            raise work.failures[0]
        return replace(result, encoded=encoded, tokens=tokens)

    def _planned(self, texts: Sequence[_Text]) -> Iterator[list[_Text]]:
        """Yield texts in the batches in which they are encoded; what is of one chunk is stored at about the same time."""
        start = tokens = 0
        for number, text in enumerate(texts, 1):
            tokens += len(text.target.context) + len(text.target.token_ids)
            if number == len(texts) or tokens > _TOGETHER * self._supply.encoder.batch_tokens:
                some = texts[start:number]
                for planned in self._supply.encoder.plan([each.target for each in some]):
                    yield [some[index] for index in planned]
                start, tokens = number, 0

    def _computed(self, work: _Work, given_up: Callable[[], bool] | None) -> Iterator[Batch]:
        """Compute the KV of texts batch by batch; see `_encode`."""
        for texts in self._planned(work.texts):
            if given_up is not None and given_up():
                return
            # Neither deleted nor replaced since they were added, nor encoded for a prompt.
            ids = list(dict.fromkeys(id for text in texts for id in text.ids))
            known = self._store.names.lookup(self._namespace, ids)
            named = {key for record in known if record is not None for key in record.keys}
            held = self._store.holds([text.key for text in texts], durable=True)
            wanted = [text for text, there in zip(texts, held, strict=True) if text.key in named and not there]
            work.finish(text for text in texts if text not in wanted)
            # Planned again, what is left of one batch is one batch, or a few.
            try:
                for part in self._supply.encode([text.target for text in wanted], patient=given_up is not None):
                    yield [(wanted[index], kv) for index, kv in part]
                    del part
            except BackendError:
                raise
            except Exception as error:  # of one text: the others are encoded
                work.failures.append(error)

    def _keep(self, batch: Batch) -> None:
        """Store KV whose names were recorded before it was encoded; they may be gone by now."""
        for text, kv in batch:
            self._store.put(text.key, kv, tenant=self._tenant)

    def _measure(self, texts: Sequence[_Text]) -> tuple[int, int, float]:
        """Return the bytes that the KV of texts would take in RAM and on disk, and the seconds that their batches would take."""
        if not texts:
            return 0, 0, 0.0
        encoder, targets = self._supply.encoder, [text.target for text in texts]
        plan = [[targets[index] for index in batch] for batch in encoder.plan(targets)]
        # One whose texts are of about the usual length.
        usual = sorted(plan, key=lambda batch: sum(len(each.token_ids) for each in batch) / len(batch))[len(plan) // 2]
        tried_s, token_s, encoded = 0.0, 0.0, list[ChunkKV]()
        while len(encoded) < len(usual) and tried_s < _TRIAL_S:
            trial = usual[: max(1, 4 * len(encoded))]
            started = time.perf_counter()
            encoded = [kv for batch in self._supply.encode(trial) for _, kv in batch]
            elapsed = time.perf_counter() - started
            tried_s += elapsed
            # That of the most texts counts: a token takes less time among many, and more where much stands before it.
            token_s = elapsed / encoder.num_tokens(trial)
        files = [pack_kv(kv, make_codec(self._config.disk_codec)) for kv in encoded]
        # Over a folder, RAM holds what the disk gives back.
        in_ram = encoded if self._store.path is None else files
        ram_bytes = sum(pack_kv(kv, make_codec(self._config.ram_codec)).nbytes for kv in in_ram)
        disk_bytes = sum(encode_chunk("0" * 32, kv).nbytes for kv in files)
        share = sum(len(target.token_ids) for target in targets) / sum(len(kv.token_ids) for kv in encoded)
        return round(share * ram_bytes), round(share * disk_bytes), token_s * sum(map(encoder.num_tokens, plan))
