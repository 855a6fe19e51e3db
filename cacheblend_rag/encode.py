"""Computing the KV of chunks on their own, behind the encoding prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import Decoder, KVCache, text_decoder
from cacheblend_rag.rope import shift_layer
from cacheblend_rag.selection.question import context_layers

__all__ = ["Encoder", "plan_batches"]

# Sharing the prefix saves its rows, but rows behind a cache need a mask where rows from the start are plainly causal, and the
# prefix's KV is copied for each row: with a few tokens it is no faster. docs/encoding.md has the figures.
_SHARED_PREFIX_TOKENS = 16


def plan_batches(lengths: Sequence[int], prefix_len: int, batch_tokens: int) -> list[list[int]]:
    """Group chunks of similar length so that little is padded.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each chunk.
    prefix_len : int
        Tokens of the encoding prefix, which stands before each chunk.
    batch_tokens : int
        Most tokens of a batch, padding included; a longer chunk is a batch of its own.

    Returns
    -------
    list of list of int
        Indices into `lengths`, longest chunks first so that the largest batch shows early whether memory suffices.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * width <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index] + prefix_len
    return batches


class Encoder:
    """Computes the KV of each chunk behind the encoding prefix.

    Encoding behind the prefix and keeping only the chunk's slice leaves one attention sink and one BOS in a prompt of many
    chunks. A prefix that is long enough to be worth it is computed once, and its KV handed to every row of every batch.

    Parameters
    ----------
    decoder : Decoder
        The model.
    prefix_ids : sequence of int
        The encoding prefix.
    batch_tokens : int
        Most tokens of a batch, prefix and padding included.
    share_prefix : bool, optional
        Whether the prefix is computed once rather than in every row; by default where that is faster.
    """

    def __init__(
        self, decoder: Decoder, prefix_ids: Sequence[int], batch_tokens: int, share_prefix: bool | None = None
    ) -> None:
        self._decoder = decoder
        self._prefix_ids = tuple(prefix_ids)
        self._batch_tokens = batch_tokens
        wanted = len(self._prefix_ids) >= _SHARED_PREFIX_TOKENS if share_prefix is None else share_prefix
        self._shares_prefix = wanted and bool(self._prefix_ids)
        self._prefix_kv: list[LayerKV] | None = None

    def plan(self, lengths: Sequence[int], placed: Sequence[bool] = ()) -> list[list[int]]:
        """Return the batches in which chunks are encoded, as indices into `lengths`.

        Parameters
        ----------
        lengths : sequence of int
            Tokens of each chunk.
        placed : sequence of bool, optional
            Whether each has positions of its own, and so a batch of its own; by default none has.
        """
        prefix_len, reach = len(self._prefix_ids), self._decoder.rope_reach
        # The longest row of a batch decides on the frequencies of all of it.
        far = [reach is not None and prefix_len + count >= reach for count in lengths]
        batches = [[index] for index, is_placed in enumerate(placed) if is_placed]
        together = [index for index in range(len(lengths)) if not placed or not placed[index]]
        for is_far in (True, False):
            alike = [index for index in together if far[index] == is_far]
            for batch in plan_batches([lengths[index] for index in alike], prefix_len, self._batch_tokens):
                batches.append([alike[place] for place in batch])
        return batches

    def encode(
        self, chunks: Sequence[Sequence[int]], positions: Sequence[Sequence[int] | None] = ()
    ) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks.

        Parameters
        ----------
        chunks : sequence of sequence of int
            Token ids of each chunk, none empty.
        positions : sequence of (sequence of int or None), optional
            Where the tokens of each chunk stand; None, or none at all: right behind the encoding prefix, without gaps. KV that
            can be moved is handed over as if it stood there in any case.

        Yields
        ------
        list of (int, ChunkKV)
            One batch: the index of each chunk in `chunks`, and its KV on the CPU.
        """
        start = len(self._prefix_ids)
        placed = [each is not None for each in positions]
        for batch in self.plan([len(ids) for ids in chunks], placed):
            places = positions[batch[0]] if placed and placed[batch[0]] else None
            layers = self._run([chunks[index] for index in batch], places)
            encoded = []
            for row, index in enumerate(batch):
                stop = start + len(chunks[index])
                # A copy, so that one chunk does not keep its whole batch in memory.
                kv = [LayerKV(*(_on_cpu(tensor[row, :, start:stop]) for tensor in layer)) for layer in layers]
                encoded.append((index, ChunkKV(tuple(chunks[index]), start, kv)))
            yield encoded

    @torch.no_grad()
    def sensitivity(self, kv: ChunkKV, neighbours: Sequence[int]) -> tuple[float, ...]:
        """Return how much each token's KV changes when the chunk stands behind other text.

        Parameters
        ----------
        kv : ChunkKV
            The chunk's KV, encoded alone.
        neighbours : sequence of int
            What it is likely to stand behind.

        Returns
        -------
        tuple of float
            For each token the squared distance between its KV in the two places over the squared norm of what is stored, keys
            moved to the same position, averaged over keys, values and layers. The last third of the layers does not count:
            what changes there hardly reaches the answer, and it drowns the rest (docs/selectors.md).
        """
        count, distance = len(kv.token_ids), len(neighbours)
        start = len(self._prefix_ids) + distance
        behind = self._forward([[*self._prefix_ids, *neighbours, *kv.token_ids]], KVCache(self._decoder.num_layers))
        device = behind[0].keys.device
        total = torch.zeros(count, device=device)
        layers = range(1, max(2, min(context_layers(self._decoder.num_layers), self._decoder.num_kv_layers)))
        # Layer 0 is the same in any context.
        for layer in layers if self._decoder.num_kv_layers > 1 else ():
            moved = LayerKV(*(part[0, :, start : start + count].clone() for part in behind[layer]))
            rotation = self._decoder.rotations[layer]
            if rotation is not None:
                shift_layer(moved, rotation.table(torch.full((count,), -distance), moved.keys.device))
            for new, stored in zip(moved, kv.layers[layer], strict=True):
                old = stored.to(new.device).float()
                change = (new.float() - old).square().sum(dim=(0, 2))
                total += (change / old.square().sum(dim=(0, 2)).clamp_min(1e-12)).to(device) / (2 * len(layers))
        return tuple(total.tolist())

    @torch.no_grad()
    def _run(self, rows: Sequence[Sequence[int]], places: Sequence[int] | None = None) -> list[LayerKV]:
        """Return the KV of each layer, ``(batch, num_kv_heads, prefix and longest chunk, head_dim)``; of one placed chunk."""
        if places is not None:
            return self._placed(rows[0], places)
        width = max(map(len, rows))
        # Padding stands behind the text, where causal attention does not see it: any id will do, without a mask.
        padded = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
        if not self._shares_prefix:
            return self._forward([[*self._prefix_ids, *row] for row in padded], KVCache(self._decoder.num_layers))
        if self._prefix_kv is None:
            self._prefix_kv = self._forward([self._prefix_ids], KVCache(self._decoder.num_layers))
        return self._forward(padded, KVCache.behind(self._prefix_kv, len(rows), len(self._prefix_ids) + width))

    def _placed(self, ids: Sequence[int], places: Sequence[int]) -> list[LayerKV]:
        """Return the KV of the encoding prefix and a chunk that stands at `places`, the chunk's moved to where it has no gaps."""
        start = len(self._prefix_ids)
        layers = self._forward([[*self._prefix_ids, *ids]], KVCache(self._decoder.num_layers), [*range(start), *places])
        distances = torch.tensor([start + number - place for number, place in enumerate(places)])
        for layer, rotation in zip(layers, self._decoder.rotations, strict=True):
            if rotation is not None:
                shift_layer(
                    LayerKV(*(part[0, :, start:] for part in layer)), rotation.table(distances, layer.keys.device)
                )
        return layers

    def _forward(
        self, rows: Sequence[Sequence[int]], cache: KVCache, positions: Sequence[int] | None = None
    ) -> list[LayerKV]:
        ids = torch.tensor(rows, device=self._decoder.device)
        with self._decoder.placing(cache, positions) as places:
            text_decoder(self._decoder.model)(input_ids=ids, past_key_values=cache, use_cache=True, **places)
        return cache.kv()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
