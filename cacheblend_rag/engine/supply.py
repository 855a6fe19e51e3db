"""The KV of a prompt's chunks: what is stored is opened, what is missing is encoded and stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

from cacheblend_rag.chunk import chunk_key
from cacheblend_rag.codec import EXACT, pack_kv
from cacheblend_rag.encode import ChunkEncoder, Target
from cacheblend_rag.engine.answering import AnsweringStore
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.backend import Attachment, EncodingModel
from cacheblend_rag.engine.request import Request, why_missed
from cacheblend_rag.errors import BackendError, ChunkReadError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.prefixes import PrefixCache
from cacheblend_rag.prompt import PromptChunk, PromptHead
from cacheblend_rag.store import KVReader, RamReader, part_of

__all__ = ["KVSupply"]

logger = logging.getLogger(__name__)
# How long what is encoded in the background gives way to prompts: callers who never stop must not keep it from ever being done.
_PATIENCE_S = 5.0


class KVSupply:
    """What a backend has of the engine that asks it: the KV of chunks, of earlier prompts, and what is attached."""

    prefixes: PrefixCache

    def __init__(self, model: EncodingModel, store: AnsweringStore, assembler: Assembler, tenant: str) -> None:
        self.store = store
        self.namespace = assembler.namespace
        self.tenant = tenant
        self.attachments: list[Attachment] = []
        self.scheduler = model.scheduler
        encoder = model.encoder(assembler.preamble)
        # What computes KV, if the model's is stored.
        self.encodes, self.encoder = encoder is not None, cast(ChunkEncoder, encoder)
        self._num_kv_layers = model.num_kv_layers
        self._warned_of_no_hit = False
        # Whether its engine was closed; set under `scheduler`.
        self.is_closed = False

    def encode(self, targets: Sequence[Target], *, patient: bool = False) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks, giving way to prompts between batches; yields as `Encoder.encode` does."""
        waiting = self.encoder.plan(targets)
        failures: list[Exception] = []
        while waiting:
            planned = waiting.pop(0)
            left = dict(enumerate(planned))
            batches = self.encoder.encode([targets[index] for index in planned])
            while left:
                turn: AbstractContextManager[None] = (
                    self.scheduler.after_others(_PATIENCE_S) if patient else self.scheduler
                )
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

    def note_held(self, request: Request, keys: Sequence[str]) -> None:
        """Note whether KV is stored that is not to be opened, and of a model that has none why."""
        request.state.hits.update(zip(keys, self.store.holds(keys), strict=True))
        if not self.encodes:
            missing = (key for key in keys if not request.state.hits[key])
            request.state.reasons |= dict.fromkeys(missing, "this model cannot be blended, so no KV is stored for it")

    def note_unreadable(self, request: Request, error: ChunkReadError) -> None:
        """Note that KV could not be read, so that it is a miss the next time; what is damaged goes."""
        logger.warning("%s", error)
        request.state.unreadable[error.key] = error.damaged
        if error.damaged:
            self.store.discard(error.key)

    def readers(self, request: Request) -> dict[int, KVReader]:
        """Return a reader of each chunk, or part, that is not taken over, by its first row; what is not stored is encoded first.

        Hits, tiers and times are filled in.
        """
        state, chunks = request.state, request.waiting
        opening = time.perf_counter()
        wanted: dict[str, list[PromptChunk]] = {}
        for chunk in chunks:
            wanted.setdefault(chunk.key, []).append(chunk)
        found: dict[str, KVReader] = {}
        for key, (chunk, *_) in wanted.items():
            reader = self._open(request, chunk)
            state.tiers[key] = None if reader is None or key in state.encoded else reader.tier
            # After damaged KV the prompt is run again; what was a miss when the call came stays one in the report.
            state.hits[key] = state.hits.get(key, True) and reader is not None
            if reader is not None:
                found[key] = reader
        state.open_s += state.note("open", opening)
        if len(found) < len(wanted):
            started = time.perf_counter()
            for key, kv in self._encode_missing({key: wanted[key] for key in wanted if key not in found}):
                found[key] = RamReader(kv)
            state.encode_s += state.note("encode", started)
        if not self._warned_of_no_hit and len(chunks) == len(request.prompt.chunks) and not any(state.hits.values()):
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
            for reader in [found[chunk.key]]
        }

    def _open(self, request: Request, what: PromptChunk | PromptHead) -> KVReader | None:
        """Return a reader of KV that was just computed or is stored; what is not what it is stored for is dropped."""
        state, key = request.state, what.key
        if (computed := state.encoded.get(key)) is not None:
            return RamReader(computed)
        reader = None if state.unreadable.get(key) is False else self.store.open(key)
        if reader is None:
            return None
        if isinstance(what, PromptHead):
            is_right = (reader.start, reader.token_ids) == (0, what.token_ids)
        else:
            # In the context that its key says.
            own = chunk_key(self.namespace, what.kv_ids, what.positions, reader.context)
            is_right = (reader.token_ids, own) == (what.kv_ids, key)
        if is_right and reader.num_layers == self._num_kv_layers:
            return reader
        logger.warning("stored KV %s… does not belong to what it is stored for; it will be computed again", key[:12])
        self.store.discard(key)
        state.unreadable[key] = True
        return None

    def head(self, request: Request, head: PromptHead) -> KVReader:
        """Return a reader of the rows of a prompt's fixed head; where there is no stored KV it is computed and kept."""
        state, started = request.state, time.perf_counter()
        reader = self._open(request, head)
        state.open_s += state.note("open", started)
        state.figures["head_tokens"] = 0 if reader is None or head.key in state.encoded else head.rows
        if reader is None:
            started = time.perf_counter()
            kv = state.encoded[head.key] = self._make_head(head)
            reader = RamReader(kv)
            state.encode_s += state.note("encode", started)
        return reader if head.rows == len(head.token_ids) else part_of(reader, 0, head.rows)

    def store_head(self, token_ids: tuple[int, ...]) -> str:
        """Have the KV of tokens that a prompt begins with where other processes find it too; return its key."""
        head = PromptHead(chunk_key(self.namespace, token_ids, is_head=True), token_ids, len(token_ids))
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
        self.store.put_later(head.key, exactly, self.namespace, {}, head.record, tenant=self.tenant)
        return kv

    def _keep(self, chunks: Sequence[PromptChunk], kv: ChunkKV) -> None:
        """Store the KV of a miss under the names of its chunks; without any in RAM only, where it goes with their ids too."""
        key = chunks[0].key
        named = {chunk.id: chunk.later for chunk in chunks if chunk.id is not None and chunk.named}
        if not named:
            ids = {chunk.id for chunk in chunks if chunk.id is not None}
            # And what it was read behind.
            ids |= {id for chunk in chunks if chunk.later is not None for id, _ in chunk.later.seen}
            self.store.cache(key, kv, self.namespace, ids, tenant=self.tenant)
            return
        self.store.put_later(key, kv, self.namespace, named, tenant=self.tenant)
