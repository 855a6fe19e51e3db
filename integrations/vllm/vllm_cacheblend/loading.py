"""Loading into vLLM's paged cache: where a request's tokens have their slots, and the stored KV for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.chunk import chunk_key
from cacheblend_rag.config import usable_cores
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVReader, KVStore, part_of
from vllm_cacheblend.prefix import PrefixPiece

__all__ = ["BlockIds", "Group", "Load", "first_held", "groups_of", "heads_of", "load_prefix", "slots_of"]

# Layers that are loaded before they are written.
_AHEAD = 2

BlockIds = tuple[tuple[int, ...], ...]
"""All blocks of a request, in order, of each group of layers."""

# vLLM puts this one where a sliding window has passed a request's own.
_NO_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Load:
    """KV that a request is to get from the store: the tokens from `first` to `stop`, those before being in vLLM's cache already.

    `token_ids` are all of its first tokens up to `stop`, and `pieces` what they are taken from, from the first token on.
    """

    token_ids: tuple[int, ...]
    namespace: str
    pieces: tuple[PrefixPiece, ...]
    first: int
    stop: int
    request_id: str = ""
    block_ids: BlockIds = ()


def load_prefix(store: KVStore, card: ModelCard, load: Load, write: Callable[[int, LayerKV], None]) -> None:
    """Read what a request asks for, and hand it over, on the card's device.

    `write` gets the number of each layer, in ascending order, and its KV at its positions, ``(num_kv_heads, stop - first,
    head_dim)``. `ChunkReadError` if some of it is gone, damaged, or not that of these tokens.
    """
    spans: list[ChunkSpan] = []
    readers: list[KVReader] = []
    row = 0
    for piece in load.pieces:
        start, stop = max(row, load.first), min(row + piece.tokens, load.stop)
        if start < stop:
            skipped = start - row
            wanted = PrefixPiece(piece.key, piece.first + skipped, stop - start)
            readers.append(_opened(store, card, load, wanted, start))
            spans.append(ChunkSpan(start - load.first, stop - load.first, start))
        row += piece.tokens
    ids = load.token_ids[load.first : load.stop]
    # On a core of its own a worker loads by itself: a thread would take its turns from it.
    threads = 2 if usable_cores() > 1 else 0
    layout = PromptLayout(ids, tuple(range(load.first, load.stop)), tuple(spans))
    with LayerLoader(card, layout, readers, 0, len(ids), _AHEAD, threads) as loader:
        for layer in range(card.num_kv_layers):
            kv = loader.synchronize(layer)
            write(layer, LayerKV(kv.keys[0], kv.values[0]))


def _opened(store: KVStore, card: ModelCard, load: Load, piece: PrefixPiece, row: int) -> KVReader:
    reader = store.open(piece.key)
    if reader is None:
        raise ChunkReadError(piece.key, "it is no longer stored", damaged=False)
    rows = slice(piece.first, piece.first + piece.tokens)
    ids = load.token_ids[row : row + piece.tokens]
    keys = (
        chunk_key(load.namespace, reader.token_ids, None, reader.context),
        chunk_key(load.namespace, reader.token_ids, is_head=True),
    )
    if reader.token_ids[rows] != ids or piece.key not in keys or reader.num_layers != card.num_kv_layers:
        raise ChunkReadError(piece.key, "it belongs to other tokens than the request's", damaged=False)
    return reader if piece.tokens == len(reader.token_ids) else part_of(reader, rows.start, rows.stop)


def heads_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the KV heads, the first dimension, of one of so many ranks, as vLLM divides them: fewer than ranks are repeated."""
    heads = tensor.shape[0]
    count, first = max(1, heads // ranks), rank * heads // ranks
    return tensor[first : first + count]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose KV is in the same blocks of each request: their names by their numbers among all layers that have KV."""

    block_size: int
    layers: Mapping[int, str]


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """Return vLLM's groups; layers that attend to the KV of others are in none."""
    found = kv_cache_config.kv_cache_groups
    # In the order of the numbers that are in the names.
    names = sorted(
        (name for each in found for name in each.layer_names),
        key=lambda name: next(int(part) for part in name.split(".") if part.isdigit()),
    )
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(
        Group(each.kv_cache_spec.block_size, {numbers[name]: name for name in each.layer_names}) for each in found
    )


def first_held(block_ids: Sequence[int], block_size: int) -> int:
    """Return the first token of a request that still has a block; a sliding window drops those before it."""
    dropped = next((place for place, block in enumerate(block_ids) if block != _NO_BLOCK), len(block_ids))
    return dropped * block_size


def slots_of(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> torch.Tensor:
    """Return the slot of each token of a request from `first` to before `stop`, int64, ``(stop - first,)``."""
    places = torch.arange(first, stop)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[places // block_size] * block_size + places % block_size
