"""The connector that vLLM loads: how much of a prompt is stored, and the stored KV in vLLM's own cache.

vLLM makes it once in the scheduler's process, where it only says how many tokens it will bring, and once in each worker's, where
it brings them. Whatever goes wrong here must not reach vLLM, which would end all requests: it is logged, and the tokens are
computed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from cacheblend_rag.errors import BackendError, CacheBlendError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store import open_store
from vllm_cacheblend.asking import NAMES_VARIABLE, REMOTE_VARIABLE, Precision, asked_pieces, asked_spool, read_card
from vllm_cacheblend.fitting import check_blocks, check_fit, check_release
from vllm_cacheblend.loading import BlockIds, Load, first_held, groups_of, heads_of, load_prefix, slots_of
from vllm_cacheblend.spooling import BlockReader, Spool, spool_folder, write_spool

__all__ = ["CacheBlendConnector"]

logger = logging.getLogger("vllm.cacheblend")


@dataclass
class _Step(KVConnectorMetadata):  # type: ignore[misc]
    """Work around a step: what the workers bring before it, and what they write after it."""

    loads: list[Load] = field(default_factory=list)
    spools: list[Spool] = field(default_factory=list)


class CacheBlendConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Takes the KV that prompts begin with from a store of cacheblend-rag.

    A request says in its `kv_transfer_params` where the KV is (`transfer_params`); requests that say nothing are left alone.

    Where all layers share a request's blocks, KV is loaded at the beginning of the step that goes on after it, and of what
    cannot be loaded vLLM is told the blocks. Where full and sliding layers have blocks of their own, vLLM takes back whole
    requests only, and only those that wait for their KV: it is loaded a step before, and a request whose KV failed is computed.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_release(vllm.__version__)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._card = card = read_card(extra["card"])
        check_fit(vllm_config, kv_cache_config, card, Precision(*extra["precision"]))
        self._groups = groups_of(kv_cache_config)
        self._waits = len(self._groups) > 1
        remote, names = (os.environ.get(name) or None for name in (REMOTE_VARIABLE, NAMES_VARIABLE))
        self._store = open_store(extra["store"], int(extra["ram_bytes"]), remote=remote, names=names)
        # Requests that waited for KV in vain: they are computed.
        self._lost: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._matched: dict[str, Load] = {}
            self._next = _Step()
            # Requests whose KV is to be written, until it is.
            self._spooled: dict[str, Spool] = {}
        else:
            self._failed: set[int] = set()
            # Requests that waited for their KV.
            self._ended: set[str] = set()
            self._reader = BlockReader(card.dtype)
            self._attention = vllm_config.compilation_config.static_forward_context
            self._spool = spool_folder(extra["store"])
            # What was read of requests whose prompts are computed in several steps.
            self._read: dict[str, list[dict[int, LayerKV]]] = {}

    def shutdown(self) -> None:
        """Close the store."""
        self._store.close()

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        """Note a request whose KV is to be written."""
        try:
            name = asked_spool(request.kv_transfer_params)
            if name is not None:
                id = request.request_id
                self._spooled[id] = Spool(id, name, request.num_prompt_tokens)
                # Of what vLLM's own cache has of a prefix, sliding layers have no more than the window.
                request.skip_reading_prefix_cache |= self._waits
        except Exception as error:
            _log(f"the KV of request {request.request_id} is not written", error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after the computed ones are stored, and whether they are there a step later only."""
        self._matched.pop(request.request_id, None)
        try:
            load = self._match(request, num_computed_tokens)
        except Exception as error:
            _log(f"request {request.request_id} is computed", error)
            return 0, False
        if load is None:
            return 0, False
        self._matched[request.request_id] = load
        return load.stop - load.first, self._waits

    def _match(self, request: Any, computed: int) -> Load | None:
        asked = asked_pieces(request.kv_transfer_params)
        if asked is None or request.request_id in self._lost:
            return None
        namespace, pieces = asked
        held = self._store.holds([piece.key for piece in pieces])
        missing = held.index(False) if False in held else len(held)
        ids = request.prompt_token_ids
        # The last token is computed in any case, for its logits.
        stop = min(sum(piece.tokens for piece in pieces[:missing]), len(ids) - 1)
        if stop <= computed:
            return None
        return Load(tuple(ids[:stop]), namespace, pieces[:missing], computed, stop, request.request_id)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which blocks a request has got for what is loaded."""
        load = self._matched.pop(request.request_id, None)
        if load is not None and num_external_tokens:
            self._next.loads.append(replace(load, block_ids=tuple(map(tuple, blocks.get_block_ids()))))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what could not be loaded: it is promised no more."""
        self._lost |= connector_output.failed_recving

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the workers load before the next step."""
        made, self._next = self._next, _Step()
        if self._spooled:
            made.spools += self._computed(scheduler_output)
        return made

    def _computed(self, output: Any) -> Iterator[Spool]:
        """Yield what is to be read when the step ends: later, sliding layers may have dropped it."""
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for id, count in output.num_scheduled_tokens.items():
            spool = self._spooled.get(id)
            if spool is None or (stop := min(computed[id] + count, spool.count)) <= spool.stop:
                continue
            block_ids = tuple(map(tuple, output.kv_connector_block_state.get_block_ids(id)))
            self._spooled[id] = now = replace(spool, first=spool.stop, stop=stop, block_ids=block_ids)
            yield now
            if stop == spool.count:
                del self._spooled[id]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        self._matched.pop(request.request_id, None)
        self._spooled.pop(request.request_id, None)
        self._lost.discard(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request of a model whose cache is in several groups."""
        return self.request_finished(request, [])

    # In a worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """See that what is written into vLLM's blocks is read back; `ConfigError` ends vLLM before it serves."""
        check_blocks(self._groups, self._attention, _put, self._reader)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Bring what this step's new requests begin with."""
        for load in self._get_connector_metadata().loads:
            try:
                self._bring(load)
            except Exception as error:
                _log("stored KV is computed instead", error)
                if self._waits:
                    self._lost.add(load.request_id)
                else:
                    [block_ids] = load.block_ids
                    size = self._groups[0].block_size
                    self._failed.update(block_ids[load.first // size : -(-load.stop // size)])
            if self._waits:
                self._ended.add(load.request_id)

    def _bring(self, load: Load) -> None:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        places = {number: place for number, *place in self._places(load.block_ids, load.first, load.stop)}
        card = replace(self._card, device=places[0][0].kv_cache.device)

        def write(number: int, kv: LayerKV) -> None:
            layer, slots = places[number]
            kept = LayerKV(*(heads_of(part, rank, ranks)[:, part.shape[1] - len(slots) :] for part in kv))
            _put(layer, kept, slots)

        load_prefix(self._store, card, load, write)

    def _places(self, block_ids: BlockIds, first: int, stop: int) -> Iterator[tuple[int, Any, torch.Tensor]]:
        """Yield each layer's number, the layer, and the slots of those of a request's tokens that it still has blocks for."""
        for group, blocks in zip(self._groups, block_ids, strict=True):
            held = min(stop, max(first, first_held(blocks, group.block_size)))
            slots = slots_of(blocks, group.block_size, held, stop)
            for number, name in group.layers.items():
                yield number, self._attention[name], slots

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: all layers are there when the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: what is written is written when all layers are computed."""

    def wait_for_save(self) -> None:
        """Read and write the prompts whose KV was asked for, before it is reported that they are computed."""
        for spool in self._get_connector_metadata().spools:
            try:
                self._take(spool)
            except Exception as error:
                self._read.pop(spool.request_id, None)
                _log("the KV of a prompt is not written", error)

    def _take(self, spool: Spool) -> None:
        read = self._read.setdefault(spool.request_id, [])
        places = self._places(spool.block_ids, spool.first, spool.stop)
        read.append({number: self._reader.rows(layer, slots) for number, layer, slots in places})
        if spool.stop == spool.count:
            del self._read[spool.request_id]
            layers = {
                number: LayerKV(
                    *(torch.cat(parts, dim=1) for parts in zip(*(each[number] for each in read), strict=True))
                )
                for number in read[0]
            }
            if any(kv.keys.shape[1] != spool.count for kv in layers.values()):
                raise BackendError(f"of {spool.count} tokens some had no block any more")
            write_spool(self._spool, spool.name, get_tensor_model_parallel_rank(), layers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be filled since the last call; vLLM computes them."""
        failed, self._failed = self._failed, set()
        return failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that waited for their KV since the last call; vLLM asks anew for the failed ones."""
        for id in finished_req_ids:
            self._read.pop(id, None)
        ended, lost = self._ended, self._lost
        self._ended, self._lost = set(), set()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=lost)


def _put(layer: Any, kv: LayerKV, slots: torch.Tensor) -> None:
    # The backend's own writer: how it lays a block out is its own affair.
    cache = layer.kv_cache
    keys, values = (part.transpose(0, 1).contiguous().to(cache.device) for part in kv)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(cache.device))


def _log(what: str, error: Exception) -> None:
    # Readers of an unforeseen error need to know where it arose.
    logger.warning("%s: %s", what, error, exc_info=None if isinstance(error, CacheBlendError) else error)
