"""Backend of models with recurrent layers: which prompts begin with a document behind a head, and what is stored of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
import transformers
from transformers import DynamicCache

from cacheblend_hybrid.states import States
from cacheblend_rag.chunk import HEAD_PREFIX, BlendPrompt, Chunk, ChunkPart, ChunkRef, FixedText, chunk_key, text_hash
from cacheblend_rag.codec import EXACT, pack_kv
from cacheblend_rag.engine.decode import Prefilled
from cacheblend_rag.engine.huggingface import TransformersBackend
from cacheblend_rag.engine.request import DAMAGED, Request
from cacheblend_rag.errors import ChunkReadError, StoreError, UnsupportedModelError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import state_layers
from cacheblend_rag.prompt import PromptChunk
from cacheblend_rag.selection import Selection
from cacheblend_rag.store import NodeRecord

__all__ = ["StateBackend", "states_of"]

logger = logging.getLogger(__name__)

_FORM = "a stored state serves prompts of a head and, right behind it, a document from its first chunk on"
# Another release may lay the same numbers out otherwise.
_CONTEXT = f"state of transformers {transformers.__version__}"


def states_of(chunk: str, document: str | None) -> str:
    """Return what the names of the stored states of a document, or of a chunk of none, begin with."""
    return f"{HEAD_PREFIX}{text_hash(document or chunk)}/"


class StateBackend(TransformersBackend):
    """A model with recurrent layers: prompts are read in full, or after a stored state.

    One state is kept for each prefix that was asked for: that at its end, under a key of all of its tokens.
    """

    states: States | None = None

    def inspect(self, strict: bool) -> tuple[None, str]:
        kinds = ", ".join(state_layers(self.model))
        reason = f"{type(self.model).__name__} has layers of type {kinds}, which keep no KV for each token"
        if strict:
            raise UnsupportedModelError(reason)
        try:
            with self.scheduler:
                self.states = States(self.model)
        except UnsupportedModelError as error:
            reason = f"{reason}; {error}"
        served = "only a document after a head is reused, other" if self.states else "its"
        logger.warning("%s; %s prompts are prefilled in full", reason, served)
        return None, reason

    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        if count > 1:
            # After a state, the last token alone is computed as the model's own forward does it.
            request = replace(request, blend=request.blend.replace(enabled=False))
        return super().last_logits(request, count)

    def read_whole(self, request: Request, inputs: dict[str, torch.Tensor]) -> Prefilled:
        prefilled = super().read_whole(request, inputs)
        states = self.states
        if states is None or not request.blend.enabled:
            return prefilled
        found = self._prefix(request)
        if isinstance(found, str):
            self._read_in_full(request, f"{_FORM}; here, {found}")
            return prefilled
        cache = self._all_but_last(states, request, *found)
        return Prefilled(inputs | states.places(inputs["input_ids"].shape[1]), cache, None)

    def _read_in_full(self, request: Request, why: str) -> None:
        request.state.fallback_reason = f"{self.reason}; {why}"

    def _prefix(self, request: Request) -> tuple[list[PromptChunk], NodeRecord] | str:
        """Return the chunks of a document that a prompt begins with, and the first one's record, or why there are none."""
        prompt = request.prompt
        if request.blend.is_full:
            return "the settings have all of it computed"
        if not prompt.chunks or prompt.places is not None:
            return "there are no chunks before its end, or the prompt places its segments itself"
        first = prompt.chunks[0]
        for chunk in prompt.computed:
            if chunk.start < first.start:
                return f"the first chunk, {chunk.id!r}, is no document: {chunk.note}"
        store, namespace = request.supply.store, request.supply.namespace
        found = store.lookup(namespace, [first.id]) if first.id is not None and first.named else None
        named = found[0] if found else None
        if named is None:
            return f"the first chunk, {first.id!r}, was not added"
        members = [named] if named.document is None else store.members(namespace, named.document)
        chunks: list[PromptChunk] = []
        for chunk, member in zip(prompt.chunks, members, strict=False):
            between = prompt.layout.token_ids[chunks[-1].stop if chunks else chunk.start : chunk.start]
            if chunk.id != member.id or chunk.is_part or (between and lexer_of(self.tokenizer).text(between).strip()):
                break
            chunks.append(chunk)
        if not chunks:
            return f"the first chunk, {first.id!r}, is not the first of its document, {named.document!r:.40}"
        return chunks, named

    def _all_but_last(
        self, states: States, request: Request, chunks: Sequence[PromptChunk], first: NodeRecord
    ) -> DynamicCache:
        """Return a cache that holds all of a prompt but its last token, and store what was not stored of it."""
        ids = request.prompt.layout.token_ids
        # What separates a chunk from the next is not counted.
        borders = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        cache, held = self._open(states, request, chunks, borders)
        if held < borders[-1]:
            states.read(cache, ids[held : borders[-1]], held)
            self._keep(request, ids[: borders[-1]], states.take(cache), chunks, first)
        return states.read(cache, ids[borders[-1] : -1], borders[-1])

    def _open(
        self, states: States, request: Request, chunks: Sequence[PromptChunk], borders: Sequence[int]
    ) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored state of a prefix, and how many tokens it holds; an empty one if there is none.

        `ChunkReadError` if the state is damaged.
        """
        state = request.state
        ids, started = request.prompt.layout.token_ids, time.perf_counter()
        cache, held = states.begin(), 0
        for border in reversed(borders):
            key = _key(request, ids[:border])
            reader = None if state.unreadable.get(key) is False else request.supply.store.open(key)
            if reader is None:
                continue
            if (reader.num_layers, reader.token_ids, reader.context) != (
                len(states.parts),
                ids[:border],
                _CONTEXT,
            ):
                raise ChunkReadError(key, "it is not the state that it is stored for")
            layers = [reader.layer(index) for index in range(reader.num_layers)]
            reader.finish()
            cache, held = states.restore(layers, border), border
            state.tiers |= {chunk.key: reader.tier for chunk in chunks if chunk.start < border}
            state.figures["load_bytes"] = sum(layer.nbytes for layer in layers)
            break
        state.wait_s += state.note("open", started)
        state.hits |= {chunk.key: chunk.start < held for chunk in chunks}
        state.reasons |= {chunk.key: DAMAGED if state.unreadable else "" for chunk in chunks}
        if not held:
            self._read_in_full(request, "no state of the document behind this head was stored; now there is one")
            return cache, 0
        rows = request.prompt.layout.context_rows
        state.recomputed = rows[rows >= held]
        state.charge = float(state.recomputed.numel() * self.num_layers)
        state.selection, state.fallback_reason = Selection(rows[:0]), None
        state.figures |= {"selector": "none", "recompute_ratio": 0.0}
        state.figures["head_tokens"] = chunks[0].start
        return cache, held

    def _keep(
        self,
        request: Request,
        ids: tuple[int, ...],
        state: list[LayerKV],
        chunks: Sequence[PromptChunk],
        first: NodeRecord,
    ) -> None:
        """Store the state after a prefix, so that deleting one of its chunks deletes it; in RAM if its head is not fixed."""
        supply, key = request.supply, _key(request, ids)
        store, namespace = supply.store, supply.namespace
        name, chunk_ids = states_of(first.id, first.document) + key, [str(chunk.id) for chunk in chunks]
        kv = pack_kv(ChunkKV(ids, 0, state, _CONTEXT), EXACT)
        if _has_fixed_head(request.asked):
            store.put_later(key, kv, namespace, {}, NodeRecord(name, key, text_hash(name), ids), tenant=supply.tenant)
        else:
            # It may be a user's own text.
            store.cache(key, kv, namespace, [*chunk_ids, name], tenant=supply.tenant)
        # Who deleted or replaced a chunk since the prompt came has not found the state.
        known = store.lookup(namespace, chunk_ids) or []
        if any(now is None or now.key != chunk.key for now, chunk in zip(known, chunks, strict=False)):
            try:
                store.store.forget(namespace, [name])
            except StoreError as error:
                logger.warning("the state of a chunk that was deleted just now is still stored: %s", error)


def _key(request: Request, ids: tuple[int, ...]) -> str:
    return chunk_key(request.supply.namespace, ids, context=_CONTEXT)


def _has_fixed_head(prompt: BlendPrompt) -> bool:
    """Return whether all text before a prompt's first chunk is said to be fixed."""
    leading = takewhile(lambda each: not isinstance(each, Chunk | ChunkRef | ChunkPart), prompt.segments)
    return all(isinstance(each, FixedText) for each in leading if each)
