"""What encoding some texts would cost, found out by encoding a few of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cacheblend_rag.codec import make_codec, pack_kv
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.chunkfile import encode_chunk

__all__ = ["WarmEstimate", "estimate_cost"]

# Texts are tried, more and more of them, until that has taken so long. Of their KV so many are written.
_TRIAL_S = 1.0
_WRITTEN = 8
# Beside its file a chunk has a row, and is brought to its place: each is synced as well.
_SYNCED = 2


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """What encoding some chunks would cost.

    Attributes
    ----------
    chunks : int
        Texts that are not stored yet, those of their documents that would be encoded again among them.
    tokens : int
        Their tokens.
    ram_bytes : int
        Size of their KV as `ram_codec` packs it; RAM keeps at most `EngineConfig.ram_bytes` of it.
    disk_bytes : int
        Size of their files as `disk_codec` packs them, in a store with a folder.
    seconds : float
        Time to compute and store it, with no other work going on.
    """

    chunks: int
    tokens: int
    ram_bytes: int = 0
    disk_bytes: int = 0
    seconds: float = 0.0


def estimate_cost(
    targets: Sequence[Target], tokens: int, supply: KVSupply, store: KVStore, config: EngineConfig
) -> WarmEstimate:
    """Return what it would cost to encode targets, of `tokens` tokens; nothing is stored."""
    if not targets:
        return WarmEstimate(0, tokens)
    plan = supply.plan(targets)
    # Batches are ordered by length, so that texts of the usual length are in the middle.
    usual = [targets[index] for index in plan[len(plan) // 2]]
    count, tried_s, token_s, encoded = 0, 0.0, 0.0, list[ChunkKV]()
    while count < len(usual) and tried_s < _TRIAL_S:
        count = min(len(usual), max(1, 4 * count))
        started = time.perf_counter()
        encoded = [kv for batch in supply.encode(usual[:count]) for _, kv in batch]
        elapsed = time.perf_counter() - started
        tried_s += elapsed
        # That of the most texts counts: a token takes less time among many, and more where much stands before it.
        token_s = elapsed / supply.num_tokens(usual[:count])
    computing_s = token_s * supply.num_tokens(targets)
    written = encoded[-_WRITTEN:]
    started = time.perf_counter()
    # A full disk, most likely.
    with suppress(StoreError):
        for probe in store.probes():
            with probe(written):
                pass
    storing_s = _SYNCED * (time.perf_counter() - started) * len(targets) / len(written)
    # A batch is computed while the one before it is stored.
    alone = 1 / len(plan)
    seconds = alone * (computing_s + storing_s) + (1 - alone) * max(computing_s, storing_s)
    lengths = [len(target.token_ids) for target in targets]
    ram, disk = make_codec(config.ram_codec), make_codec(config.disk_codec)
    longest = max(encoded, key=lambda kv: len(kv.token_ids))
    return WarmEstimate(
        len(targets),
        tokens,
        # Over a folder, RAM holds what the disk gives back.
        _total(longest, lengths, lambda kv: pack_kv(kv if store.path is None else pack_kv(kv, disk), ram).nbytes),
        _total(longest, lengths, lambda kv: encode_chunk("0" * 32, pack_kv(kv, disk)).nbytes),
        seconds,
    )


def _total(kv: ChunkKV, lengths: Sequence[int], size: Callable[[ChunkKV], int]) -> int:
    """Return the size of texts of these lengths: so much for each, and so much for each token, as seen on one text."""
    count = len(kv.token_ids)
    whole, least = size(kv), size(_first(kv, 1))
    each = (whole - least) / (count - 1) if count > 1 else least
    return round(len(lengths) * (whole - each * count) + each * sum(lengths))


def _first(kv: ChunkKV, count: int) -> ChunkKV:
    """Return the KV of the first tokens of a text."""
    layers = [LayerKV(*(tensor[:, :count] for tensor in layer)) for layer in kv.layers]
    return ChunkKV(kv.token_ids[:count], kv.start, layers, kv.context)
