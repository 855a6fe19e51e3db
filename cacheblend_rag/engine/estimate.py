"""Estimating what encoding texts would cost, by encoding a few of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cacheblend_rag.codec import make_codec, pack_kv
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import encode_chunk

__all__ = ["measure"]

# Texts, more and more of them, are tried for this long.
_TRIAL_S = 1.0


def measure(
    plan: Sequence[Sequence[Target]], supply: KVSupply, config: EngineConfig, is_in_ram: bool
) -> tuple[int, int, float]:
    """Return the bytes that the KV of texts would take in RAM and on disk, and the seconds that their batches would take."""
    if not plan:
        return 0, 0, 0.0
    encoder, targets = supply.encoder, [target for batch in plan for target in batch]
    # One whose texts are of about the usual length.
    usual = sorted(plan, key=lambda batch: sum(len(target.token_ids) for target in batch) / len(batch))[len(plan) // 2]
    tried_s, token_s, encoded = 0.0, 0.0, list[ChunkKV]()
    while len(encoded) < len(usual) and tried_s < _TRIAL_S:
        trial = usual[: max(1, 4 * len(encoded))]
        started = time.perf_counter()
        encoded = [kv for batch in supply.encode(trial) for _, kv in batch]
        elapsed = time.perf_counter() - started
        tried_s += elapsed
        # That of the most texts counts: a token takes less time among many, and more where much stands before it.
        token_s = elapsed / encoder.num_tokens(trial)
    files = [pack_kv(kv, make_codec(config.disk_codec)) for kv in encoded]
    # Over a folder, RAM holds what the disk gives back.
    held = [pack_kv(kv, make_codec(config.ram_codec)).nbytes for kv in (encoded if is_in_ram else files)]
    share = sum(len(target.token_ids) for target in targets) / sum(len(kv.token_ids) for kv in encoded)
    disk_bytes = sum(encode_chunk("0" * 32, kv).nbytes for kv in files)
    return round(share * sum(held)), round(share * disk_bytes), token_s * sum(map(encoder.num_tokens, plan))
