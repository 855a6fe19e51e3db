"""Connectors in a vLLM of a number never seen, in one with other blocks, and in one whose attention reads otherwise."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import vllm  # type: ignore[import-not-found]
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # type: ignore[import-not-found]
from vllm_cacheblend.connector import CacheBlendConnector


class Unseen(CacheBlendConnector):
    """The connector in a vLLM of another number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(vllm, "__version__", "99.1"):
            super().__init__(*args, **kwargs)


class OtherBlocks(CacheBlendConnector):
    """The connector in a vLLM whose writer counts slots from the last one on."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        write = CPUAttentionBackendImpl.do_kv_cache_update

        def otherwise(
            impl: Any, layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            write(impl, layer, keys, values, cache, cache.shape[0] * cache.shape[2] - 1 - slots)

        with patch.object(CPUAttentionBackendImpl, "do_kv_cache_update", otherwise):
            super().register_kv_caches(kv_caches)


class OtherAttention(Unseen):
    """The connector in a vLLM whose attention makes something else of what the writer wrote."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for load in self._get_connector_metadata().loads:
            for layer in self._attention.values():
                layer.kv_cache[list(load.block_ids[0])] *= 0.5
