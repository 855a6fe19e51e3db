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
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index

from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.tuning import usable_cores
from vllm_cacheblend.asking import NAMES_VARIABLE, REMOTE_VARIABLE, asked_pieces, asked_spool
from vllm_cacheblend.fitting import check_fit
from vllm_cacheblend.loading import Load, PrefixLoader, heads_of
from vllm_cacheblend.slots import blocks_of, slots_of
from vllm_cacheblend.spooling import BlockReader, Spool, spool_path, write_spool

__all__ = ["CacheBlendConnector"]

logger = logging.getLogger("vllm.cacheblend")

_AHEAD = 2


@dataclass
class _Step(KVConnectorMetadata):  # type: ignore[misc]
    """Work around a step: what the workers bring before it, and what they write after it."""

    loads: list[Load] = field(default_factory=list)
    spools: list[Spool] = field(default_factory=list)


class CacheBlendConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Takes the KV that prompts begin with from a store of cacheblend-rag.

    A request says in its `kv_transfer_params` where the KV is (`transfer_params`); requests that say nothing are left alone.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        card = ModelCard.from_dict(_given(extra, "card"))
        check_fit(vllm.__version__, vllm_config, kv_cache_config, card)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._store = self._opened(extra)
        if role == KVConnectorRole.SCHEDULER:
            self._matched: dict[str, Load] = {}
            self._next = _Step()
            # Requests whose KV is to be written, until it is.
            self._spooled: dict[str, Spool] = {}
        else:
            self._card = card
            self._failed: set[int] = set()
            self._loader: PrefixLoader | None = None
            self._reader = BlockReader()
            self._attention = vllm_config.compilation_config.static_forward_context
            self._spool = None if extra.get("spool") is None else Path(extra["spool"])

    @staticmethod
    def _opened(extra: Mapping[str, Any]) -> KVStore:
        remote, names = (os.environ.get(name) or None for name in (REMOTE_VARIABLE, NAMES_VARIABLE))
        return open_store(_given(extra, "store"), int(extra.get("ram_bytes", 1 << 30)), remote=remote, names=names)

    def shutdown(self) -> None:
        """Close the store."""
        self._store.close()

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        """Note a request whose KV is to be written."""
        try:
            name = asked_spool(request.kv_transfer_params)
            if name is not None:
                self._spooled[request.request_id] = Spool(name, request.num_prompt_tokens)
        except Exception as error:
            _log(f"the KV of request {request.request_id} is not written", error)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after the computed ones are stored, and that they are there when the step begins."""
        self._matched.pop(request.request_id, None)
        try:
            load = self._match(request, num_computed_tokens)
        except Exception as error:
            _log(f"request {request.request_id} is computed", error)
            return 0, False
        if load is None:
            return 0, False
        self._matched[request.request_id] = load
        return load.stop - load.first, False

    def _match(self, request: Any, computed: int) -> Load | None:
        asked = asked_pieces(request.kv_transfer_params)
        if asked is None:
            return None
        namespace, pieces = asked
        held = self._store.holds([piece.key for piece in pieces])
        missing = held.index(False) if False in held else len(held)
        ids = request.prompt_token_ids
        # The last token is computed in any case, for its logits.
        stop = min(sum(piece.count for piece in pieces[:missing]), len(ids) - 1)
        if stop <= computed:
            return None
        return Load(tuple(ids[:stop]), namespace, pieces[:missing], computed, stop)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which blocks a request has got for what is loaded."""
        load = self._matched.pop(request.request_id, None)
        if load is not None and num_external_tokens:
            [block_ids] = blocks.get_block_ids()
            self._next.loads.append(load.into(block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the workers load before the next step."""
        made, self._next = self._next, _Step()
        if self._spooled:
            made.spools += self._ending(scheduler_output)
        return made

    def _ending(self, output: Any) -> Iterator[Spool]:
        """Yield the requests whose whole prompt is computed when the step ends."""
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for id, count in output.num_scheduled_tokens.items():
            spool = self._spooled.get(id)
            if spool is not None and computed[id] + count >= spool.count:
                del self._spooled[id]
                [block_ids] = output.kv_connector_block_state.get_block_ids(id)
                yield replace(spool, block_ids=tuple(block_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free at once."""
        self._matched.pop(request.request_id, None)
        self._spooled.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request of a model whose cache is in several groups."""
        return self.request_finished(request, [])

    # In a worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Bring what this step's new requests begin with."""
        for load in self._get_connector_metadata().loads:
            try:
                self._bring(load, self._layers(forward_context.no_compile_layers))
            except Exception as error:
                _log("stored KV is computed instead", error)
                self._failed.update(blocks_of(load.block_ids, self._block_size, load.first, load.stop))

    def _bring(self, load: Load, layers: Mapping[int, Any]) -> None:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        cache = layers[0].kv_cache
        if self._loader is None:
            card = self._card.on(cache.device)
            # On a core of its own a worker loads by itself: a thread would take its turns from it.
            threads = 2 if usable_cores() > 1 else 0
            self._loader = PrefixLoader(self._store, card, _AHEAD, threads)
        slots = slots_of(load.block_ids, self._block_size, load.first, load.stop).to(cache.device)

        def write(number: int, kv: LayerKV) -> None:
            layer = layers[number]
            keys, values = (heads_of(part, rank, ranks).transpose(0, 1).contiguous() for part in kv)
            # The backend's own writer: how it lays a block out is its own affair.
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

        self._loader.load(load, write)

    def _layers(self, all_layers: Mapping[str, Any]) -> dict[int, Any]:
        """Return the attention layers by their numbers."""
        return {
            extract_layer_index(name): layer
            for name, layer in all_layers.items()
            if hasattr(getattr(layer, "impl", None), "do_kv_cache_update")
        }

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: all layers are there when the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: what is written is written when all layers are computed."""

    def wait_for_save(self) -> None:
        """Write the prompts whose KV was asked for, before it is reported that they are computed."""
        for spool in self._get_connector_metadata().spools:
            try:
                self._write(spool)
            except Exception as error:
                _log("KV is not written to the spool", error)

    def _write(self, spool: Spool) -> None:
        if self._spool is None:
            raise ConfigError("this server was given no folder to write KV to; give kv_transfer_config a spool")
        layers = {
            number: self._reader.rows(layer, spool.block_ids, self._block_size, spool.count)
            for number, layer in self._layers(self._attention).items()
        }
        write_spool(spool_path(self._spool, spool.name, get_tensor_model_parallel_rank()), layers)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be filled since the last call; vLLM computes them."""
        failed, self._failed = self._failed, set()
        return failed


def _log(what: str, error: Exception) -> None:
    # Readers of an unforeseen error need to know where it arose.
    logger.warning("%s: %s", what, error, exc_info=None if isinstance(error, CacheBlendError) else error)


def _given(extra: Mapping[str, Any], name: str) -> Any:
    if name not in extra:
        raise ConfigError(f"kv_connector_extra_config has no {name!r}; make it by vllm_cacheblend.kv_transfer_config")
    return extra[name]
