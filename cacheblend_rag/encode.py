"""Computing the KV of chunks on their own, behind the encoding prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import Decoder, KVCache

__all__ = ["encode_chunks", "plan_batches"]


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


def encode_chunks(
    decoder: Decoder, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]], batch_tokens: int
) -> Iterator[list[tuple[int, ChunkKV]]]:
    """Compute the KV of each chunk behind the encoding prefix.

    Encoding behind the prefix and keeping only the chunk's slice leaves one attention sink and one BOS in a prompt of
    many chunks.

    Parameters
    ----------
    decoder : Decoder
        The model.
    prefix_ids : sequence of int
        The encoding prefix.
    chunks : sequence of sequence of int
        Token ids of each chunk, none empty.
    batch_tokens : int
        Most tokens of a batch, padding included.

    Yields
    ------
    list of (int, ChunkKV)
        One batch: the index of each chunk in `chunks`, and its KV on the CPU.
    """
    start = len(prefix_ids)
    for batch in plan_batches([len(ids) for ids in chunks], start, batch_tokens):
        layers = _run(decoder, [[*prefix_ids, *chunks[index]] for index in batch])
        encoded = []
        for row, index in enumerate(batch):
            stop = start + len(chunks[index])
            # A copy, so that one chunk does not keep its whole batch in memory.
            kv = [
                LayerKV(*(tensor[row, :, start:stop].to("cpu", copy=True).contiguous() for tensor in layer))
                for layer in layers
            ]
            encoded.append((index, ChunkKV(tuple(chunks[index]), start, kv)))
        yield encoded


@torch.no_grad()
def _run(decoder: Decoder, rows: Sequence[Sequence[int]]) -> list[LayerKV]:
    width = max(map(len, rows))
    # Padding stands behind the text, where causal attention does not see it: any id will do, without a mask.
    ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows], device=decoder.device)
    cache = KVCache(decoder.num_layers)
    decoder.model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache.kv()
