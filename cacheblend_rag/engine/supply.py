"""The KV of a prompt's chunks: what is stored is opened, what is missing is encoded and stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from cacheblend_rag.chunk import chunk_key
from cacheblend_rag.codec import EXACT, pack_kv
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import ChunkEncoder, Target
from cacheblend_rag.engine.answering import AnsweringStore
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.request import Request, why_missed
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.errors import BackendError, ChunkReadError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.prompt import PromptChunk, PromptHead
from cacheblend_rag.store import KVReader
from cacheblend_rag.store.base import part_of
from cacheblend_rag.store.memory import RamReader

__all__ = ["KVSupply"]

logger = logging.getLogger(__name__)


class KVSupply:
    """Supplies the KV of chunks, from one store or by one model."""

    def __init__(
        self,
        encoder: ChunkEncoder | None,
        num_kv_layers: int,
        scheduler: Scheduler,
        store: AnsweringStore,
        assembler: Assembler,
        config: EngineConfig,
    ) -> None:
        self.store = store
        self._namespace = assembler.namespace
        self._encoder = encoder
        self._tenant = config.tenant or ""
        self.num_kv_layers = num_kv_layers
        self._warned_of_no_hit = False
        self.scheduler = scheduler
        # Whether its engine was closed; set under `scheduler`.
        self.is_closed = False

    @property
    def encoder(self) -> ChunkEncoder:
        """What computes KV; only asked of a model that can be blended."""
        assert self._encoder is not None
        return self._encoder

    def encode(self, targets: Sequence[Target], *, patient: bool = False) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks, giving way to prompts between batches; yields as `Encoder.encode` does."""
        waiting = self.encoder.plan(targets)
        failures: list[Exception] = []
        while waiting:
            planned = waiting.pop(0)
            left = dict(enumerate(planned))
            batches = self.encoder.encode([targets[index] for index in planned])
            while left:
                turn: AbstractContextManager[None] = self.scheduler.after_others() if patient else self.scheduler
                with turn:
                    try:
                        batch = [(left.pop(number), kv) for number, kv in next(batches)]
                    except BackendError:
                        raise
                    except Exception as error:  # whatever a model raises, or a device without memory
                        # Its frames hold what the batch held, which is to be gone before anything else is computed.
                        failures += [error.with_traceback(None)] if len(left) == 1 else []
                        break
                yield batch
                del batch
            rest = list(left.values())
            if len(rest) > 1:
                waiting[:0] = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        if failures:
            raise failures[0]

    def encode_misses(self, requests: Sequence[Request]) -> None:
        """Encode the missing chunks of prompts to be blended in one go, each once; what cannot be encoded stays a miss."""
        missing: dict[str, list[tuple[Request, PromptChunk]]] = {}
        for request in requests:
            keys = [chunk.key for chunk in request.prompt.chunks]
            held = request.state.hits = dict(zip(keys, self.store.holds(keys), strict=True))
            self.note_fates(request, [key for key, there in held.items() if not there])
            for chunk in request.prompt.chunks:
                if not held[chunk.key]:
                    missing.setdefault(chunk.key, []).append((request, chunk))
        started = time.perf_counter()
        chunks_of = {key: [chunk for _, chunk in wanted] for key, wanted in missing.items()}
        try:
            for key, kv in self._encode_missing(chunks_of):
                for request, _ in missing[key]:
                    request.state.encoded[key] = kv
        except Exception as error:  # each prompt that lacks it finds out for itself
            logger.debug("not all misses were encoded together: %s", error)
        elapsed = time.perf_counter() - started
        tokens = sum(len(chunk.token_ids) for wanted in missing.values() for _, chunk in wanted)
        for request, chunk in (each for wanted in missing.values() for each in wanted):
            request.state.encode_s += elapsed * len(chunk.token_ids) / tokens

    def _encode_missing(self, missing: Mapping[str, Sequence[PromptChunk]]) -> Iterator[tuple[str, ChunkKV]]:
        """Encode chunks of prompts in one go, keep their KV, and yield it by its key."""
        keys = list(missing)
        targets = [missing[key][0].target for key in keys]
        for batch in self.encode(targets) if keys else ():
            for index, kv in batch:
                self._keep(missing[keys[index]], kv)
                yield keys[index], kv

    def open_all(self, request: Request) -> dict[str, KVReader | None]:
        """Return a reader, or None, of each chunk that is not taken over, by its key; hits, tiers and times are filled in."""
        state = request.state
        opening = time.perf_counter()
        found: dict[str, KVReader | None] = {}
        for chunk in {chunk.key: chunk for chunk in request.waiting}.values():
            computed = state.encoded.get(chunk.key)
            reader: KVReader | None
            if computed is not None:
                reader, tier = RamReader(computed), None
            else:
                reader = None if state.unreadable.get(chunk.key) is False else self.store.open(chunk.key)
                # It is of the chunk's tokens, in the context that its key says.
                if reader is not None and (
                    (reader.num_layers, reader.token_ids) != (self.num_kv_layers, chunk.kv_ids)
                    or chunk.key != chunk_key(self._namespace, chunk.kv_ids, chunk.positions, reader.context)
                ):
                    logger.warning(
                        "stored KV %s… does not belong to the chunk it is stored for; it will be computed again",
                        chunk.key[:12],
                    )
                    self.store.discard(chunk.key)
                    state.unreadable[chunk.key] = True
                    reader = None
                tier = None if reader is None else reader.tier
            found[chunk.key], state.tiers[chunk.key] = reader, tier
            # After damaged KV the prompt is run again; what was a miss when the call came stays one in the report.
            state.hits[chunk.key] = state.hits.get(chunk.key, True) and reader is not None
        if missing := [key for key, reader in found.items() if reader is None]:
            self.note_fates(request, missing)
        state.open_s += state.note("open", opening)
        return found

    def note_held(self, request: Request, keys: Sequence[str]) -> None:
        """Note whether KV is stored that is not to be opened, and what became of it otherwise."""
        request.state.hits.update(zip(keys, self.store.holds(keys), strict=True))
        self.note_fates(request, [key for key in keys if not request.state.hits[key]])

    def note_unreadable(self, request: Request, error: ChunkReadError) -> None:
        """Note that KV could not be read, so that it is a miss the next time; what is damaged goes."""
        logger.warning("%s", error)
        request.state.unreadable[error.key] = error.damaged
        if error.damaged:
            self.store.discard(error.key)

    def note_fates(self, request: Request, keys: Sequence[str]) -> None:
        """Note where the model is why KV is not stored."""
        if self._encoder is None:
            request.state.fates |= dict.fromkeys(keys, "unsupported")

    def readers(self, request: Request, found: dict[str, KVReader | None]) -> dict[int, KVReader]:
        """Return a reader of each chunk, or part, that is not taken over, by its first row; encode those that `found` lacks."""
        chunks = request.waiting
        missing = {chunk.key: chunk for chunk in chunks if found[chunk.key] is None}
        if missing:
            started = time.perf_counter()
            wanted = {key: [chunk for chunk in chunks if chunk.key == key] for key in missing}
            for key, kv in self._encode_missing(wanted):
                found[key] = RamReader(kv)
            request.state.encode_s += request.state.note("encode", started)
        if (
            not any(request.state.hits.values())
            and len(chunks) == len(request.prompt.chunks)
            and not self._warned_of_no_hit
        ):
            self._warned_of_no_hit = True
            logger.warning(
                "none of the %d chunks of this prompt was served from the store, so all of them were encoded first; reason for "
                "the first: %s (this warning is not repeated)",
                len(chunks),
                why_missed(request, chunks[0]),
            )
        return {
            chunk.start: reader
            if len(chunk) == len(reader.token_ids)
            else part_of(reader, chunk.first, chunk.first + len(chunk))
            for chunk in chunks
            if (reader := found[chunk.key]) is not None
        }

    def head(self, request: Request, head: PromptHead) -> KVReader:
        """Return a reader of the rows of a prompt's fixed head; where there is no stored KV it is computed and kept."""
        state = request.state
        started = time.perf_counter()
        computed = state.encoded.get(head.key)
        reader: KVReader | None = None
        if computed is not None:
            reader = RamReader(computed)
        elif state.unreadable.get(head.key) is not False:
            reader = self.store.open(head.key)
        if reader is not None and (reader.num_layers, reader.start, reader.token_ids) != (
            self.num_kv_layers,
            0,
            head.token_ids,
        ):
            self.store.discard(head.key)
            reader = None
        state.open_s += state.note("open", started)
        state.figures["head_tokens"] = head.rows if reader is not None and computed is None else 0
        if reader is None:
            started = time.perf_counter()
            kv = state.encoded[head.key] = self._make_head(head)
            reader = RamReader(kv)
            state.encode_s += state.note("encode", started)
        return reader if head.rows == len(head.token_ids) else part_of(reader, 0, head.rows)

    def store_head(self, token_ids: tuple[int, ...]) -> str:
        """Have the KV of tokens that a prompt begins with where other processes find it too; return its key."""
        head = PromptHead(chunk_key(self._namespace, token_ids, is_head=True), token_ids, len(token_ids))
        if not self.store.store.holds([head.key], durable=True)[0]:
            self._make_head(head)
            self.store.store.settle()
        return head.key

    def _make_head(self, head: PromptHead) -> ChunkKV:
        """Compute the KV of a prompt's head, and keep it."""
        with self.scheduler:
            kv = self.encoder.head(head.token_ids)
        # Whatever codec the tiers keep chunks in, these rows stand for computed ones.
        exactly = pack_kv(kv, EXACT)
        self.store.put_later(head.key, exactly, self._namespace, {}, head.record, tenant=self._tenant)
        return kv

    def _keep(self, chunks: Sequence[PromptChunk], kv: ChunkKV) -> None:
        """Store the KV of a miss under the names of its chunks; without any in RAM only, where it goes with their ids too."""
        key = chunks[0].key
        named = {chunk.id: chunk.later for chunk in chunks if chunk.id is not None and chunk.named}
        if not named:
            ids = {chunk.id for chunk in chunks if chunk.id is not None}
            # And what it was read behind.
            ids |= {id for chunk in chunks if chunk.later is not None for id, _ in chunk.later.seen}
            self.store.cache(key, kv, self._namespace, ids, tenant=self._tenant)
            return
        self.store.put_later(key, kv, self._namespace, named, tenant=self._tenant)
