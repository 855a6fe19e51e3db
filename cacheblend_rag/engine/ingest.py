"""Adding chunks: what is new is encoded and stored, batch by batch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddJob, Jobs
from cacheblend_rag.engine.estimate import measure
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import BackendError, ConfigError, PromptError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.reading import Member
from cacheblend_rag.report import AddResult, WarmEstimate
from cacheblend_rag.store import KVStore, NamedTarget, NodeRecord
from cacheblend_rag.store.documents import MOST_RECORDS

__all__ = ["Ingest"]

logger = logging.getLogger(__name__)

# Batches that are planned together.
_TOGETHER = 8
# Tokens a byte that text seldom has, and how many tokens of such chunks are worth a warning.
_DENSE = 0.75
_MANY_DENSE = 2000


class _Text:
    """KV to be computed, and the chunks (one at least) whose it is."""

    def __init__(
        self, key: str, names: list[NamedTarget], is_counted: bool, positions: tuple[int, ...] | None = None
    ) -> None:
        record = names[0].record
        behind = record.later.behind if record.later is not None and record.later.key == key else ()
        self.names = names
        self.key = key
        # Whether the chunks are counted as encoded with this KV, rather than with their other.
        self.is_counted = is_counted
        self.num_tokens = len(record.token_ids) if is_counted else 0
        self.target = Target(record.token_ids + record.separator, behind, positions)


Batch = Sequence[tuple[_Text, ChunkKV]]


@dataclass(slots=True)
class _Todo:
    """Work that adding some chunks takes."""

    # The chunks whose names are not recorded exactly so.
    names: list[NamedTarget]
    # To be encoded.
    texts: list[_Text]
    # How many of the chunks given are named or lack their KV, and how many are stored exactly so.
    changed: int
    unchanged: int
    # Counts the chunks given.
    job: AddJob
    # The chunks given, by their ids, and why some of them, or texts, are left out.
    chunks: Mapping[object, Chunk] = field(default_factory=dict)
    refusals: list[Exception] = field(default_factory=list)
    # How many texts each chunk still waits for.
    waits: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waits = Counter(id(target) for text in self.texts for target in text.names)

    def finished(self, texts: Iterable[_Text]) -> int:
        """Return how many chunks have all of their KV with these texts."""
        ids = [id(target) for text in texts for target in text.names]
        self.waits.subtract(ids)
        return sum(not self.waits[each] for each in set(ids))

    def left(self) -> list[str]:
        """Return the ids, of chunks that have one, that still wait for a text."""
        waiting = (each.record.id for text in self.texts for each in text.names if self.waits[id(each)])
        return list(dict.fromkeys(filter(None, waiting)))


class Ingest:
    """Brings chunks into the store; of a model that cannot be blended they are known by their tokens, and have no KV."""

    def __init__(
        self,
        assembler: Assembler,
        supply: KVSupply,
        store: KVStore,
        form: Decoder | ModelCard | None,
        config: EngineConfig,
    ) -> None:
        self._assembler = assembler
        self._namespace = assembler.namespace
        self._supply = supply
        self._store = store
        self._tenant = config.tenant or ""
        self._config = config
        self._form = form
        self._has_told = False
        # Names under which there are so many short texts that they are no document's.
        self._categories: set[str] = set()
        self.jobs = Jobs()

    def add(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int, int], None] | None,
        on_refused: Callable[[Chunk, PromptError], None] | None,
        background: bool,
        whole: bool,
    ) -> AddResult | AddJob:
        """Encode and name what is not stored yet; see `BlendEngine.add`."""
        todo = self._todo(chunks, progress, on_refused, whole)
        # Names come first: whoever is killed leaves misses.
        self._name([target.record for target in todo.names], whole)
        if background:
            refusals, todo.refusals = todo.refusals, []
            job = self.jobs.submit(todo.job, partial(self._encode, todo, self._store_named))
            if refusals:
                raise refusals[0]
            return job
        result = self._encode(todo, self._store_named)
        if todo.refusals:
            left = todo.left()
            self._store.forget(self._namespace, left)
            if on_refused is None or not left:
                raise todo.refusals[0]
            for id in left:
                why = PromptError(f"chunk {id!r} is left out: it could not be encoded: {todo.refusals[0]}")
                on_refused(todo.chunks[id], why)
        return result

    def encode_later(self, ids: Sequence[str]) -> None:
        """Have named chunks encoded in the background, as far as their KV is missing then; where that fails they stay misses."""
        try:
            names = self._store.names
            targets = [target for target in names.targets(self._namespace, ids) if target is not None]
            documents = {
                target.document: names.around(self._namespace, target.record.id)
                for target in targets
                if target.document is not None
            }
            texts = self._texts(self._with_companions(targets, documents), {})
            todo = _Todo(
                [], texts, 0, len(targets), AddJob(0, len({id(target) for text in texts for target in text.names}))
            )
            self.jobs.submit(todo.job, partial(self._encode, todo, self._store_missed))
        except (ConfigError, StoreError) as error:
            logger.debug("not encoded in the background: %s", error)

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost, by encoding a few of its texts; see `BlendEngine.estimate`."""
        todo = self._todo(chunks, on_refused=lambda chunk, error: None, is_trial=True)
        plan = [[text.target for text in batch] for batch in self._planned(todo.texts)]
        new, tokens = sum(text.is_counted for text in todo.texts), sum(text.num_tokens for text in todo.texts)
        return WarmEstimate(new, tokens, *measure(plan, self._supply, self._config, self._store.path is None))

    def _todo(
        self,
        chunks: Iterable[Chunk],
        progress: Callable[[int, int], None] | None = None,
        on_refused: Callable[[Chunk, PromptError], None] | None = None,
        whole: bool = False,
        is_trial: bool = False,
    ) -> _Todo:
        """Tokenise chunks; find out which are not stored exactly so."""
        # What was met as a miss is written first, so that it is not computed again.
        self._store.settle()
        records: list[NodeRecord] = []
        positions: dict[str, tuple[int, ...] | None] = {}
        refused: list[str] = []
        refusals: list[Exception] = []
        dense = 0
        # Chunks without an id are all kept; of several with one id the last counts.
        by_id = {(chunk.id if chunk.id is not None else object()): chunk for chunk in chunks}
        for chunk in by_id.values():
            if chunk.document in self._categories and chunk.start is None:
                chunk = replace(chunk, document=None, body=None)
            try:
                record = self._assembler.record(chunk)
            except PromptError as error:
                if on_refused is not None:
                    on_refused(chunk, error)
                    refused += [] if chunk.id is None else [chunk.id]
                elif whole:
                    raise
                else:
                    refusals.append(error)
                continue
            records.append(record)
            if chunk.positions is not None:
                positions[record.key] = self._assembler.places(chunk)
            if chunk.token_ids is None and len(record.token_ids) > _DENSE * len(chunk.text.encode()):
                dense += len(record.token_ids)
        if self._form is not None and dense > _MANY_DENSE:
            logger.warning(
                "%d tokens are in chunks with nearly one token per byte (base64, hashes, numbers, scripts that the tokenizer "
                "hardly knows): %.0f MB of KV before the disk's codec, %s; leave out text that nobody will ask about",
                dense,
                dense * self._form.kv_bytes_per_token / 1e6,
                self._config.disk_codec,
            )
        if refused and not is_trial:
            self._store.forget(self._namespace, refused)
        targets, documents = self._store.names.rehearse(self._namespace, records, whole=whole)
        for target, record in zip(targets, records, strict=True):
            if record.place is not None and target.document is None and record.place.document not in self._categories:
                self._categories.add(record.place.document)
                logger.warning(
                    "%.200s is treated as a category, not a document: more than %d short texts have it, and none says where it "
                    "begins. They are of no document; if they are pieces of one, say where each begins (start, or "
                    "add_start_index=True of a splitter)",
                    record.place.document,
                    MOST_RECORDS,
                )
        targets = self._with_companions(targets, documents, positions)
        texts = self._texts(targets, positions)
        lacking = {id(target) for text in texts for target in text.names}
        renewed = {target.document for target in targets if target.is_changed and target.document} if whole else set()
        unchanged = sum(not target.is_changed and id(target) not in lacking for target in targets)
        return _Todo(
            [target for target in targets if target.is_changed or target.document in renewed],
            texts,
            len(targets) - unchanged,
            unchanged,
            AddJob(len(targets) - len(lacking), len(targets), progress),
            by_id,
            refusals,
        )

    def _with_companions(
        self, targets: Sequence[NamedTarget], documents: Mapping[str, Sequence[Member]], placed: Container[str] = ()
    ) -> list[NamedTarget]:
        """Return targets with what they are read behind chosen, where it is still to be, but for those with `placed` keys."""
        companions = self._assembler.companions
        if companions is None:
            return list(targets)
        # What a prompt places itself has KV for its own place.
        waiting = [
            number
            for number, each in enumerate(targets)
            if each.record.later is None
            and each.record.key not in placed
            and not self._assembler.is_placed(each.record)
        ]
        chosen = companions.choose(
            [(targets[number].record, documents.get(targets[number].document or "", ())) for number in waiting]
        )
        found = list(targets)
        for number, later in zip(waiting, chosen, strict=True):
            record = replace(found[number].record, later=later)
            found[number] = replace(
                found[number], record=record, is_changed=bool(record.id) or found[number].is_changed
            )
        return found

    def _texts(self, targets: Sequence[NamedTarget], positions: Mapping[str, tuple[int, ...] | None]) -> list[_Text]:
        """Return what is to be computed: of each chunk the KV that is not stored."""
        if self._form is None:
            # Of a model without blending no KV is ever missing.
            return []
        keys = list(dict.fromkeys(key for target in targets for key in target.record.keys))
        held = dict(zip(keys, self._store.holds(keys, durable=True), strict=True))
        missing: dict[str, list[NamedTarget]] = {}
        for target in targets:
            for key in dict.fromkeys(target.record.keys):
                if not held[key]:
                    missing.setdefault(key, []).append(target)
        counted = set[int]()
        texts = []
        for key, names in missing.items():
            texts.append(_Text(key, names, counted.isdisjoint(map(id, names)), positions.get(key)))
            counted |= set(map(id, names))
        return texts

    def _encode(
        self, todo: _Todo, store: Callable[[Batch], None], given_up: Callable[[], bool] | None = None
    ) -> AddResult:
        """Encode texts batch by batch, while the batch before is stored by `store` in a thread."""
        encoded = tokens = chunks = 0
        started = time.perf_counter()
        storing = Future[None]()
        storing.set_result(None)
        todo.job.tell()
        with ThreadPoolExecutor(1, "cacheblend-writer") as writer:
            try:
                for batch in self._computed(todo, given_up):
                    encoded += sum(text.is_counted for text, _ in batch)
                    tokens += sum(text.num_tokens for text, _ in batch)
                    storing.result()
                    todo.job.advance(chunks)
                    chunks = todo.finished(text for text, _ in batch)
                    try:
                        storing = writer.submit(store, batch)
                    except RuntimeError:
                        # Python ends, and starts no threads any more.
                        store(batch)
                    # Once it is stored, nothing should keep a batch in memory while the next is computed.
                    del batch
                storing.result()
            except BaseException as error:
                late = storing.exception()
                if late is not None and late is not error:
                    logger.warning("an earlier batch could not be stored either: %s", late)
                raise
        todo.job.advance(chunks)
        if encoded and todo.changed and not self._has_told:
            self._has_told = True
            held, folder = self._store.stats(), self._store.path
            where, size = ("RAM", held.ram_bytes) if folder is None else (folder, held.disk_bytes)
            logger.info(
                "%d chunks of %d tokens encoded in %.1f s; the store in %s now has %.1f MB of KV (logged once per engine)",
                *(encoded, tokens, time.perf_counter() - started, where, size / 1e6),
            )
        if given_up is not None and todo.refusals:
            raise todo.refusals[0]
        return AddResult(encoded, todo.changed, todo.unchanged, tokens)

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

    def _computed(self, todo: _Todo, given_up: Callable[[], bool] | None) -> Iterator[Batch]:
        """Compute the KV of texts batch by batch; see `_encode`."""
        for texts in self._planned(todo.texts):
            if given_up is not None:
                if given_up():
                    return
                # Neither deleted nor replaced since they were added, nor encoded for a prompt.
                held = self._store.holds([text.key for text in texts], durable=True)
                found = zip(texts, held, self._named(texts), strict=True)
                wanted = [text for text, is_held, is_named in found if is_named and not is_held]
                todo.job.advance(todo.finished(text for text in texts if text not in wanted))
                texts = wanted
            # Planned again, what is left of one batch is one batch, or a few.
            try:
                for part in self._supply.encode([text.target for text in texts], patient=given_up is not None):
                    yield [(texts[index], kv) for index, kv in part]
                    del part
            except BackendError:
                raise
            except Exception as error:  # of one text: the others are encoded
                todo.refusals.append(error)

    def _store_named(self, batch: Batch) -> None:
        """Store KV whose names were recorded before it was encoded; they may be gone by now."""
        for text, kv in batch:
            is_named = all(target.record.id for target in text.names)
            self._store.put(text.key, kv, tenant=self._tenant, is_named=is_named)

    def _store_missed(self, batch: Batch) -> None:
        try:
            self._store_named(batch)
        except StoreError as error:
            logger.warning("the KV of misses was not stored: %s", error)

    def _name(self, records: Iterable[NodeRecord], whole: bool) -> None:
        named = [record for record in records if record.id]
        self._store.name(self._namespace, named, tenant=self._tenant, whole=whole)

    def _named(self, texts: Sequence[_Text]) -> list[bool]:
        """Return of each text whether a name leads to its KV, or it has no id by which it could have been deleted."""
        ids = [target.record.id for text in texts for target in text.names if target.record.id]
        known = dict(zip(ids, self._store.names.lookup(self._namespace, ids), strict=True))
        keys = {id: () if record is None else record.keys for id, record in known.items()}
        return [
            any(not target.record.id or text.key in keys[target.record.id] for target in text.names) for text in texts
        ]
