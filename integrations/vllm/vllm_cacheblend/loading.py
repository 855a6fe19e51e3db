"""Loading into vLLM's paged cache: stored KV is read layer by layer, turned to its position, and written into its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.keys import chunk_key
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.base import part_of
from vllm_cacheblend.prefix import PrefixPiece
from vllm_cacheblend.slots import BlockIds

__all__ = ["Load", "PrefixLoader", "heads_of"]


@dataclass(frozen=True, slots=True)
class Load:
    """KV that a request is to get from the store.

    Attributes
    ----------
    token_ids : tuple of int
        The request's first tokens, up to `stop`.
    namespace : str
        That of the keys.
    pieces : tuple of PrefixPiece
        What they are taken from, from the first token on.
    first, stop : int
        Which of them are loaded; those before `first` are in vLLM's cache already.
    request_id : str
        Whose they are.
    block_ids : BlockIds
        The request's blocks.
    """

    token_ids: tuple[int, ...]
    namespace: str
    pieces: tuple[PrefixPiece, ...]
    first: int
    stop: int
    request_id: str = ""
    block_ids: BlockIds = ()

    def into(self, block_ids: Sequence[Sequence[int]]) -> Load:
        """Return it with the blocks that it goes into."""
        return replace(self, block_ids=tuple(map(tuple, block_ids)))

    def sound(self, error: Exception) -> int:
        """Return how many of the request's first tokens are not touched by an error in loading them."""
        if not isinstance(error, ChunkReadError):
            return 0
        keys = [piece.key for piece in self.pieces]
        failed = keys.index(error.key) if error.key in keys else 0
        return sum(piece.count for piece in self.pieces[:failed])


class PrefixLoader:
    """Loads what requests begin with.

    Parameters
    ----------
    store : KVStore
        The store.
    card : ModelCard
        The model's KV, and the device that it goes to.
    ahead, threads : int
        How many layers are loaded before they are written, and how many threads load.
    """

    def __init__(self, store: KVStore, card: ModelCard, ahead: int, threads: int) -> None:
        self._store = store
        self._card = card
        self._ahead = ahead
        self._threads = threads

    def load(self, load: Load, write: Callable[[int, LayerKV], None]) -> None:
        """Read what a request asks for, and hand it over.

        Parameters
        ----------
        load : Load
            What it asks for.
        write : callable
            Gets the number of each layer, in ascending order, and its KV at its positions, ``(num_kv_heads, stop - first,
            head_dim)``.

        Raises
        ------
        ChunkReadError
            If some of it is gone, damaged, or not that of these tokens.
        """
        spans: list[ChunkSpan] = []
        readers: list[KVReader] = []
        row = 0
        for piece in load.pieces:
            start, stop = max(row, load.first), min(row + piece.count, load.stop)
            if start < stop:
                skipped = start - row
                wanted = PrefixPiece(piece.key, piece.first + skipped, stop - start)
                readers.append(self._open(load, wanted, start))
                spans.append(ChunkSpan(start - load.first, stop - load.first, start))
            row += piece.count
        ids = load.token_ids[load.first : load.stop]
        layout = PromptLayout(ids, tuple(range(load.first, load.stop)), tuple(spans))
        with LayerLoader(self._card, layout, readers, 0, len(ids), self._ahead, self._threads) as loader:
            for layer in range(self._card.num_kv_layers):
                kv = loader.synchronize(layer)
                write(layer, LayerKV(kv.keys[0], kv.values[0]))

    def _open(self, load: Load, piece: PrefixPiece, row: int) -> KVReader:
        reader = self._store.open(piece.key)
        if reader is None:
            raise ChunkReadError(piece.key, "it is no longer stored", damaged=False)
        rows = slice(piece.first, piece.first + piece.count)
        ids = load.token_ids[row : row + piece.count]
        keys = (
            chunk_key(load.namespace, reader.token_ids, None, reader.context),
            chunk_key(load.namespace, reader.token_ids, is_head=True),
        )
        if reader.token_ids[rows] != ids or piece.key not in keys or reader.num_layers != self._card.num_kv_layers:
            raise ChunkReadError(piece.key, "it belongs to other tokens than the request's", damaged=False)
        return reader if piece.count == len(reader.token_ids) else part_of(reader, rows.start, rows.stop)


def heads_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the KV heads of a tensor-parallel rank, as vLLM divides them: fewer than ranks are repeated.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(num_kv_heads, seq_len, head_dim)``.
    rank, ranks : int
        Which of how many.
    """
    heads = tensor.shape[0]
    count, first = max(1, heads // ranks), rank * heads // ranks
    return tensor[first : first + count]
