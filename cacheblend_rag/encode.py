"""Encoding of chunks after the preamble and what else they are read behind."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import torch

from cacheblend_rag.chunk import context_digest
from cacheblend_rag.kv import ChunkKV, LayerKV, Rotation, RotationTable, shift_layer
from cacheblend_rag.model import CACHE, Decoder, KVCache, ModelCard, placing, text_decoder

__all__ = ["ChunkEncoder", "Encoder", "Reading", "Target", "kept_of", "plan_batches", "shared_length"]

# Sharing the preamble saves its rows, but rows after a cache need a mask where rows from the start are plainly causal, and the
# preamble's KV is copied for each row: with a few tokens it is no faster.
_SHARED_PREAMBLE_TOKENS = 16
# Of a batch's width, in each of its rows.
_LEAST_FILLED = 0.75
# Tokens of a forward on a CPU, which computes more of them no faster: whoever asks waits no longer.
_AT_ONCE = 512
# Of what the last text was read behind: neighbours begin with the same passages, whether they come together or one by one.
_KEPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Target:
    """Tokens to be encoded, one at least, after the preamble and a context."""

    token_ids: tuple[int, ...]
    context: tuple[int, ...] = ()
    # Where they stand, of tokens without a context; None: right after what stands before them, without gaps.
    positions: tuple[int, ...] | None = None


Reading: TypeAlias = "list[tuple[tuple[int, ...], list[int]]]"
"""Targets that are encoded in one pass, because each begins with what the one before it has read, or most of that.

Each step is what is read in one forward, without the preamble, and the indices of the targets in it. A step goes on where it
parts from the one before.
"""


def plan_batches(lengths: Sequence[int], preamble_len: int, batch_tokens: int) -> list[list[int]]:
    """Group chunks of these lengths, in tokens, so that little is padded; return indices, longest first."""
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        is_close = batches and _LEAST_FILLED * width <= lengths[index] + preamble_len
        if is_close and (len(batches[-1]) + 1) * width <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index] + preamble_len
    return batches


class ChunkEncoder(ABC):
    """Computes the KV of each chunk after the preamble and its context, wherever the model is."""

    def __init__(self, form: Decoder | ModelCard, preamble: Sequence[int], batch_tokens: int) -> None:
        self._form = form
        self.preamble = tuple(preamble)
        self.batch_tokens = batch_tokens
        # Of one forward; more are read in several.
        self.most_tokens = sys.maxsize

    @abstractmethod
    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks, in batches: the index of each target, and its KV on the CPU, as if it stood right after
        the preamble.

        `ChunkKV.start` is where it was read, and `ChunkKV.context` the `context_digest` of the target's context.
        """

    @abstractmethod
    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        """Compute the KV of what a prompt begins with, the BOS included, from position 0 on; it is on the CPU."""

    def plan(self, targets: Sequence[Target]) -> list[list[int]]:
        """Return the batches in which targets are encoded, as indices into `targets`."""
        return [
            [index for reading in batch for _, indices in reading for index in indices]
            for batch in self.batches(targets)
        ]

    def num_tokens(self, targets: Sequence[Target]) -> int:
        """Return how many tokens are computed to encode targets, the preamble and padding not counted."""
        count = 0
        read: tuple[int, ...] = ()
        for reading in _readings(targets, range(len(targets)), self.batch_tokens):
            for sequence, _ in reading:
                count += len(sequence) - shared_length(read, sequence)
                read = sequence
            read = kept_of(reading, targets)
        return count

    def batches(self, targets: Sequence[Target]) -> list[list[Reading]]:
        """Return what is read together; a placed target, and a document whose parts part from each other, is read alone."""
        preamble_len, reach = len(self.preamble), self._form.rope_reach
        batches: list[list[Reading]] = [
            [[(target.token_ids, [index])]] for index, target in enumerate(targets) if target.positions is not None
        ]
        indices = [index for index, target in enumerate(targets) if target.positions is None]
        readings = _readings(targets, indices, self.batch_tokens)
        batches += [[reading] for reading in readings if len(reading) > 1]
        single = [reading for reading in readings if len(reading) == 1]
        lengths = [len(sequence) for [(sequence, _)] in single]
        # The longest row of a batch decides on the frequencies of all of it.
        far = [reach is not None and preamble_len + length >= reach for length in lengths]
        most = min(self.batch_tokens, self.most_tokens)
        for is_far in (True, False):
            alike = [number for number, each in enumerate(far) if each == is_far]
            for batch in plan_batches([lengths[number] for number in alike], preamble_len, most):
                batches.append([single[alike[place]] for place in batch])
        return batches

    def cut_out(self, layers: Sequence[LayerKV], target: Target) -> ChunkKV:
        """Return a target's KV, cut out of that of its sequence and turned to where it would stand without its context."""
        start, distance, count = len(self.preamble), len(target.context), len(target.token_ids)
        first = start + distance
        tables: dict[tuple[Rotation, torch.device], RotationTable] = {}
        kept = []
        for layer, rotation in zip(layers, self._form.rotations, strict=True):
            # A copy, so that one chunk does not keep its whole batch in memory.
            copies = (tensor[:, first : first + count].clone(memory_format=torch.contiguous_format) for tensor in layer)
            kv = LayerKV(*copies)
            if rotation is not None and distance:
                known = (rotation, kv.keys.device)
                if known not in tables:
                    tables[known] = rotation.table(torch.full((count,), -distance), kv.keys.device)
                shift_layer(kv, tables[known])
            kept.append(LayerKV(*(tensor.cpu() for tensor in kv)))
        return ChunkKV(target.token_ids, start, kept, context=context_digest(target.context))


class Encoder(ChunkEncoder):
    """Computes the KV of chunks with the model of this process."""

    def __init__(self, decoder: Decoder, preamble: Sequence[int], batch_tokens: int) -> None:
        super().__init__(decoder, preamble, batch_tokens)
        if decoder.model.device.type == "cpu":
            self.most_tokens = _AT_ONCE
        self._decoder = decoder
        self._read = text_decoder(decoder.model)
        self._shares_preamble = len(self.preamble) >= _SHARED_PREAMBLE_TOKENS
        # The beginning of what was read last, and its KV with the preamble's; none before anything was read.
        self._kept: tuple[tuple[int, ...], list[LayerKV]] = (), []

    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        for batch in self.batches(targets):
            sequence, indices = batch[0][0]
            places = targets[indices[0]].positions
            if places is None:
                yield from self._run(batch, targets)
            else:
                # A placed target is a batch of its own.
                yield [(indices[0], self.cut_out(self._placed(sequence, places), targets[indices[0]]))]

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        layers = self._forward([token_ids], KVCache(self._decoder.num_layers))
        kept = [
            LayerKV(*(tensor[0].clone(memory_format=torch.contiguous_format).cpu() for tensor in layer))
            for layer in layers
        ]
        return ChunkKV(tuple(token_ids), 0, kept)

    def _run(self, batch: Sequence[Reading], targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Yield the targets of readings, forward by forward: of several that have one step each, or of one."""
        read, ahead, cache = self._begin(
            [reading[0][0] for reading in batch], max(len(sequence) for reading in batch for sequence, _ in reading)
        )
        for steps in zip(*batch, strict=True):
            width = max(len(sequence) for sequence, _ in steps)
            known = min(shared_length(read, steps[0][0]), width - 1)
            cache.cut(len(self.preamble) + known)
            # Padding stands after the text, where causal attention does not see it: any id will do, without a mask.
            rows = [[*ahead, *row[known:], *[row[-1]] * (width - len(row))] for row, _ in steps]
            # Where the length decides on the frequencies, all is read at once.
            piece = max(self.most_tokens // len(rows), 1) if self._form.rope_reach is None else len(rows[0])
            for begin in range(0, len(rows[0]), piece):
                if begin:
                    yield []
                layers = self._forward([row[begin : begin + piece] for row in rows], cache)
            ahead, read = (), steps[0][0]
            found = []
            for number, (_, indices) in enumerate(steps):
                own = [LayerKV(kv.keys[number], kv.values[number]) for kv in layers]
                found += [(index, self.cut_out(own, targets[index])) for index in indices]
            # Whoever has all targets does not come back.
            if steps[0] is batch[0][-1] and (kept := kept_of(batch[0], targets)) != self._kept[0]:
                stop = len(self.preamble) + len(kept)
                self._kept = kept, [LayerKV(*(part[:1, :, :stop].clone() for part in kv)) for kv in layers]
            yield found

    def _begin(self, rows: Sequence[Sequence[int]], length: int) -> tuple[tuple[int, ...], tuple[int, ...], KVCache]:
        """Return what all rows begin with, of which the cache has the KV, what is read before the rest of them, the preamble or
        nothing after its KV, and the cache, with room for `length` tokens.
        """
        kept, layers = self._kept
        known = min(shared_length(kept, row) for row in rows)
        if not known and not self._shares_preamble:
            return (), self.preamble, KVCache(self._decoder.num_layers)
        if not layers:
            layers = self._forward([self.preamble], KVCache(self._decoder.num_layers))
            self._kept = (), layers
        stop = len(self.preamble) + known
        before = [LayerKV(*(part[:, :, :stop] for part in kv)) for kv in layers]
        return kept[:known], (), KVCache.after(before, len(rows), len(self.preamble) + length)

    def _placed(self, ids: Sequence[int], places: Sequence[int]) -> list[LayerKV]:
        """Return the KV of the preamble and a chunk that stands at `places`, the chunk's moved to where it has no gaps."""
        start = len(self.preamble)
        cache = KVCache(self._decoder.num_layers)
        computed = self._forward([[*self.preamble, *ids]], cache, [*range(start), *places])
        layers = [LayerKV(kv.keys[0], kv.values[0]) for kv in computed]
        distances = torch.tensor([start + number - place for number, place in enumerate(places)])
        for layer, rotation in zip(layers, self._decoder.rotations, strict=True):
            if rotation is not None:
                chunk = LayerKV(*(part[:, start:] for part in layer))
                shift_layer(chunk, rotation.table(distances, layer.keys.device))
        return layers

    @torch.no_grad()
    def _forward(
        self, rows: Sequence[Sequence[int]], cache: KVCache, positions: Sequence[int] | None = None
    ) -> list[LayerKV]:
        model = self._decoder.model
        where = {} if positions is None else placing(model, positions)
        self._read(input_ids=torch.tensor(rows, device=model.device), **{CACHE: cache}, use_cache=True, **where)
        return cache.kv()


def _readings(targets: Sequence[Target], indices: Sequence[int], most_tokens: int) -> list[Reading]:
    """Chain targets of which one begins with what another has read, while together they read no more than that many tokens."""
    readings: list[Reading] = []
    tokens = 0
    sequences = {index: targets[index].context + targets[index].token_ids for index in indices}
    # In this order what begins alike stands together, the shorter first.
    for index, sequence in sorted(sequences.items(), key=itemgetter(1)):
        target = targets[index]
        if target.context and readings:
            read, inside = readings[-1][-1]
            known = shared_length(read, sequence)
            tokens += len(sequence) - known
            if tokens <= most_tokens and known == len(read):
                # Nothing parts the two: one forward reads both.
                readings[-1][-1] = sequence, [*inside, index]
                continue
            if tokens <= most_tokens and 2 * known >= min(len(read), len(target.context)):
                readings[-1].append((sequence, [index]))
                continue
        readings.append([(sequence, [index])])
        tokens = len(sequence)
    return readings


def kept_of(reading: Reading, targets: Sequence[Target]) -> tuple[int, ...]:
    """Return what an encoder keeps of a reading for the next: the beginning of what its last target was read behind."""
    _, indices = reading[-1]
    return targets[indices[-1]].context[:_KEPT_TOKENS]


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return int(np.argmin(np.equal(one[:length], other[:length])))
