"""Running prompts: which of them begin with a document behind a head, and what is stored of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from cacheblend_hybrid.states import States
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkPart, ChunkRef, FixedText, text_hash
from cacheblend_rag.codec import EXACT, pack_kv
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.runner import Forward, Runner
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import ChunkReadError, StoreError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.fuse.plan import Plan
from cacheblend_rag.keys import HEAD_PREFIX, chunk_key
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import watch_forward
from cacheblend_rag.prefixes import PrefixCache
from cacheblend_rag.prompt import PromptChunk
from cacheblend_rag.selection import FixedSelection, make_selector
from cacheblend_rag.store import NodeRecord
from cacheblend_rag.store.base import earliest
from cacheblend_rag.tuning import Tuning

__all__ = ["StateRunner", "source_of"]

logger = logging.getLogger(__name__)

_FORM = "a stored state serves prompts of a head and, right behind it, a document from its first chunk on"
# Of what stands after a document, where the model reads after a state one token at a time.
_MOST_STEPS = 64
# Another release may lay the same numbers out otherwise.
_CONTEXT = f"state of transformers {transformers.__version__}"


def source_of(chunk: str, document: str | None) -> str:
    """Return what the states of a document, or of a chunk of none, are said to be made of; with it they go."""
    return HEAD_PREFIX + (document or chunk)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a prompt begins with after its head: the first chunks of a document, and how long they live."""

    chunks: tuple[PromptChunk, ...]
    lives_s: float | None = None
    # What its states are said to be made of; None for text that was not added.
    source: str | None = None
    # What its state goes with (`Entry.tied`) if it is kept in RAM alone, since the head, or the chunk, may be a user's own text.
    tied: tuple[str, str | None, str | None] | None = None

    @property
    def borders(self) -> list[int]:
        """The rows at which its chunks end, what separates them from others not counted."""
        return [chunk.start + len(chunk.token_ids) for chunk in self.chunks]


class StateRunner(Runner):
    """Runs prompts on a model with recurrent layers: in full, or after a stored state.

    One state is kept for each prefix that was asked for: that at its end, under a key of all of its tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        unsupported: str,
        supply: KVSupply,
        tuning: Tuning,
        prefixes: PrefixCache,
        states: States,
        tokenizer: Any,
        namespace: str,
        tenant: str,
    ) -> None:
        super().__init__(model, None, unsupported, supply, tuning, prefixes)
        self._supply.store = supply.store
        self._states, self._namespace, self._tenant = states, namespace, tenant
        self._lexer = lexer_of(tokenizer)

    def run(self, request: Request, headroom: int, forward: Forward) -> torch.Tensor:
        def read(cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            found = self._prefix(request) if request.blend.enabled else None
            if isinstance(found, str):
                assert request.plan is not None
                why = f"{self._unsupported}; {_FORM}; here, {found}"
                request.plan = replace(request.plan, fallback_reason=why)
            if not isinstance(found, _Prefix) or request.is_given_up:
                return forward(cache, inputs)
            with self._after(request, found):
                return forward(cache, inputs)

        return super().run(request, headroom, read)

    def _prefix(self, request: Request) -> _Prefix | str:
        """Return what of a prompt can be taken over, or why it is nothing."""
        prompt, blend = request.prompt, request.blend
        selector = make_selector(blend.selector).name
        if selector == "full" or (blend.recompute_ratio == 1 and selector != "none"):
            return "the settings have all of it computed"
        if not prompt.chunks:
            return "there are no chunks before its end"
        if prompt.places is not None:
            return "the prompt places its segments itself"
        first = prompt.chunks[0]
        for chunk in prompt.computed:
            if chunk.start < first.start:
                return f"the first chunk, {chunk.id!r}, is no document: {chunk.note}"
        named = (
            self._supply.store.targets(self._namespace, [first.id])[0] if first.id is not None and first.named else None
        )
        document = None if named is None else named.document
        order = [first.id] if document is None else self._supply.store.document(self._namespace, document) or []
        chunks: list[PromptChunk] = []
        for chunk, id in zip(prompt.chunks, order, strict=False):
            between = prompt.layout.token_ids[chunks[-1].stop if chunks else chunk.start : chunk.start]
            if chunk.id != id or chunk.is_part or (between and self._lexer.text(between).strip()):
                break
            chunks.append(chunk)
        if not chunks:
            return f"the first chunk, {first.id!r}, is not the first of its document, {document!r:.40}"
        if named is None:
            tied = self._namespace, None if first.text_hash else first.id, first.source
            prefix = _Prefix(tuple(chunks), tied=tied)
        else:
            source, is_fixed = source_of(named.record.id, document), _has_fixed_head(request.asked)
            prefix = _Prefix(
                tuple(chunks), named.lives_s, source, None if is_fixed else (self._namespace, None, source)
            )
        after = len(prompt.layout) - prefix.borders[-1]
        if not self._states.in_one and after > _MOST_STEPS:
            return (
                f"{after} tokens stand after the document, and more than {_MOST_STEPS} are read in full sooner, since the "
                "model reads after a state one token at a time"
            )
        return prefix

    @contextmanager
    def _after(self, request: Request, prefix: _Prefix) -> Iterator[None]:
        """Have the model's next forward compute the last token of a prompt, after a cache that holds all before it."""
        ids, border = request.prompt.layout.token_ids, prefix.borders[-1]
        cache, held = self._open(request, prefix)
        self._note(request, prefix, held)
        thread, is_begun = threading.get_ident(), False

        def hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal is_begun
            if is_begun or threading.get_ident() != thread:
                return None
            is_begun = True
            # A prompt has no padding.
            return args, {**kwargs, "attention_mask": None, **self._states.arguments(cache, ids[-1:], len(ids) - 1)}

        # What reads is inside of the model whose forward is watched.
        with watch_forward(self._model, before=hand_over):
            if held < border:
                self._states.read(cache, ids[held:border], held)
                self._keep(ids[:border], cache, prefix)
            self._states.read(cache, ids[border:-1], border)
            yield

    def _open(self, request: Request, prefix: _Prefix) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored state of a prefix, and how many tokens it holds; an empty one if there is none.

        `ChunkReadError` if the state is damaged.
        """
        ids, started = request.prompt.layout.token_ids, time.perf_counter()
        # Where the model reads after a state token by token, it reads a prefix from its beginning sooner.
        borders = prefix.borders if self._states.in_one else prefix.borders[-1:]
        keys = {self._key(ids[:border]): border for border in borders}
        for key, border in reversed(keys.items()):
            reader = None if request.unreadable.get(key) is False else self._supply.store.open(key)
            if reader is None:
                continue
            if (reader.num_layers, reader.token_ids, reader.context) != (self._states.count, ids[:border], _CONTEXT):
                raise ChunkReadError(key, "it is not the state that it is stored for")
            layers = [reader.layer(index) for index in range(reader.num_layers)]
            reader.finish()
            try:
                cache = self._states.restore(layers, border)
            except (ValueError, RuntimeError) as error:
                raise ChunkReadError(key, str(error)) from error
            request.tiers |= {chunk.key: reader.tier for chunk in prefix.chunks if chunk.start < border}
            request.figures["load_bytes"] = sum(layer.nbytes for layer in layers)
            request.wait_s += request.note("open", started)
            return cache, border
        request.wait_s += request.note("open", started)
        fates: Mapping[str, Any] = self._supply.store.fates(list(keys)) | dict.fromkeys(request.unreadable, "damaged")
        fate = next(filter(None, map(fates.get, keys)), None)
        request.fates |= {chunk.key: fate for chunk in prefix.chunks}
        return self._states.begin(), 0

    def _note(self, request: Request, prefix: _Prefix, held: int) -> None:
        """Note what of a prompt is taken over, and what is computed."""
        request.hits |= {chunk.key: chunk.start < held for chunk in prefix.chunks}
        if not held:
            why = "no state of the document behind this head was stored; now there is one"
            request.plan = Plan(None, "full", fallback_reason=f"{self._unsupported}; {why}")
            return
        request.fates |= {chunk.key: None for chunk in prefix.chunks}
        rows = request.prompt.layout.context_rows
        request.recomputed = rows[rows >= held]
        request.charge = float(request.recomputed.numel() * self._num_layers)
        request.plan = Plan(FixedSelection(rows[:0]), "none", 0.0)
        request.figures["head_tokens"] = prefix.chunks[0].start

    def _keep(self, ids: tuple[int, ...], cache: DynamicCache, prefix: _Prefix) -> None:
        """Store the state after a prefix, so that deleting one of its chunks deletes it."""
        key = self._key(ids)
        name = HEAD_PREFIX + key
        state = pack_kv(ChunkKV(ids, 0, self._states.take(cache), _CONTEXT), EXACT)
        owner: dict[str, Any] = {"tenant": self._tenant, "ttl_s": earliest(prefix.lives_s, self._supply.ttl_s)}
        if prefix.tied is not None:
            self._supply.store.cache(key, state, **owner, tied=prefix.tied)
        else:
            record = NodeRecord(name, key, text_hash(name), ids, source=prefix.source)
            self._supply.store.put_later(key, state, self._namespace, [record], **owner)
        if prefix.source is None:
            return
        # Who deleted or replaced a chunk since the prompt came has not found the state.
        known = self._supply.store.lookup(self._namespace, [str(chunk.id) for chunk in prefix.chunks]) or []
        if any(now is None or now.key != chunk.key for now, chunk in zip(known, prefix.chunks, strict=False)):
            try:
                self._supply.store.store.forget(self._namespace, [], [prefix.source])
            except StoreError as error:
                logger.warning("the state of a chunk that was deleted just now is still stored: %s", error)

    def _key(self, ids: tuple[int, ...]) -> str:
        return chunk_key(self._namespace, ids, context=_CONTEXT)


def _has_fixed_head(prompt: BlendPrompt) -> bool:
    """Return whether all text before a prompt's first chunk is said to be fixed."""
    leading = takewhile(lambda each: not isinstance(each, Chunk | ChunkRef | ChunkPart), prompt.segments)
    return all(isinstance(each, FixedText) for each in leading if each)
