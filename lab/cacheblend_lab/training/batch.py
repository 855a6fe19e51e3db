"""Examples as tensors, one row a context with all its questions, and the attention that lets a question see these alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedTokenizerFast

from cacheblend_lab.reference.prompt import BOS, PromptFormat
from cacheblend_lab.training.corpus import Example
from cacheblend_lab.training.questions import compared

__all__ = [
    "BRANCHED",
    "IGNORED",
    "Batch",
    "Row",
    "branched_attention",
    "collate",
    "copy_batch",
    "encode_example",
    "verdict_batch",
]

IGNORED = -100
_ROUND_TO = 8
_SHARED = 0
_PADDING = -1
_NO_CHUNK = -1
_MAX_JUMP = 64
# A context attends in blocks of this many tokens: each to all blocks before it, and to itself.
_BLOCK = 512


@dataclass
class Row:
    """One context with its questions, as parallel lists over its tokens.

    Attributes
    ----------
    ids, positions
        Token ids, and their positions; every question begins where the context ends.
    branches
        0 for what all questions share, else the question's number counted from 1.
    chunks
        The chunk a token belongs to, or -1.
    labels
        The token to be predicted here, or :data:`IGNORED`.
    """

    ids: list[int]
    positions: list[int]
    branches: list[int]
    chunks: list[int]
    labels: list[int]

    def append(
        self, ids: Sequence[int], start: int, branch: int, chunk: int, labels: Sequence[int] | None = None
    ) -> int:
        """Append tokens at positions from `start` on; return the position after them."""
        self.ids.extend(ids)
        self.positions.extend(range(start, start + len(ids)))
        self.branches.extend([branch] * len(ids))
        self.chunks.extend([chunk] * len(ids))
        self.labels.extend(labels if labels is not None else [IGNORED] * len(ids))
        return start + len(ids)


@dataclass
class Batch:
    """Rows on a grid: `context_length` shared tokens, then the questions, `question_length` tokens each.

    `branches` is -1 at padding.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    branches: torch.Tensor
    chunks: torch.Tensor
    labels: torch.Tensor
    context_length: int
    question_length: int

    def context_lengths(self) -> list[int]:
        """Return how many tokens each row's questions share, padding not counted."""
        counted: list[int] = (self.branches[:, : self.context_length] != _PADDING).sum(1).tolist()
        return counted

    def mask(self, reuse: bool = False) -> torch.Tensor:
        """Return which token sees which, as a boolean tensor ``(batch, 1, seq_len, seq_len)``.

        With `reuse`, chunk tokens see only BOS and their own chunk: what plain reuse of chunk KV amounts to.
        """
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        queries, keys = self.branches[:, :, None], self.branches[:, None, :]
        visible = causal & ((keys == _SHARED) | (keys == queries))
        if reuse:
            chunk_queries, chunk_keys = self.chunks[:, :, None], self.chunks[:, None, :]
            first = torch.zeros(length, dtype=torch.bool, device=self.ids.device)
            first[0] = True
            visible &= (chunk_queries == _NO_CHUNK) | (chunk_queries == chunk_keys) | first
        # Padding sees itself, for a row of the softmax must not be empty.
        visible |= torch.eye(length, dtype=torch.bool, device=self.ids.device)
        return visible[:, None]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.type == "torch.Tensor"}
        return replace(self, **moved)


def encode_example(tokenizer: PreTrainedTokenizerFast, example: Example, form: PromptFormat, gap: int = 0) -> Row:
    """Encode an example the way the engine assembles a prompt: piece by piece, each chunk on its own.

    A `gap` of positions after the head keeps the model from getting used to one length.
    """
    # What stands before the question's own line is the same for all questions, and is computed once.
    shared, line, opening = form.middle.rpartition("\n")
    texts = [form.prefix(), form.separator, shared + line, *example.chunks]
    for question in example.questions:
        texts.extend((opening + question.text + form.tail, question.sentence))
    head, separator, middle, *rest = tokenizer(texts, add_special_tokens=False)["input_ids"]
    row = Row([], [], [], [], [])
    place = row.append(head, 0, _SHARED, _NO_CHUNK) + gap
    for number, ids in enumerate(rest[: len(example.chunks)]):
        if number:
            place = row.append(separator, place, _SHARED, _NO_CHUNK)
        place = row.append(ids, place, _SHARED, number)
    place = row.append(middle, place, _SHARED, _NO_CHUNK)
    eos = tokenizer.eos_token_id
    branches = rest[len(example.chunks) :]
    for number, (ask, answer) in enumerate(zip(branches[::2], branches[1::2], strict=True), start=1):
        labels = [IGNORED] * (len(ask) - 1) + [*answer, eos]
        row.append([*ask, *answer], place, number, _NO_CHUNK, labels)
    return row


def collate(rows: Sequence[Row]) -> Batch:
    """Lay rows out on a grid: the shared tokens first, then every question, each padded on the right to a common length."""
    counts = [Counter(row.branches) for row in rows]
    context = _rounded(max(count[_SHARED] for count in counts))
    questions = max(len(count) - 1 for count in counts)
    width = _rounded(max((size for count in counts for branch, size in count.items() if branch != _SHARED), default=0))

    def on_grid(values: list[int], branches: list[int], fill: int) -> list[int]:
        grid = [fill] * (context + questions * width)
        filled = Counter[int]()
        for value, branch in zip(values, branches, strict=True):
            start = 0 if branch == _SHARED else context + (branch - 1) * width
            grid[start + filled[branch]] = value
            filled[branch] += 1
        return grid

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([on_grid(getattr(row, name), row.branches, fill) for row in rows])

    return Batch(
        padded("ids", 0),
        padded("positions", 0),
        padded("branches", _PADDING),
        padded("chunks", _NO_CHUNK),
        padded("labels", IGNORED),
        context,
        width,
    )


def _rounded(length: int) -> int:
    return -(-length // _ROUND_TO) * _ROUND_TO


def copy_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, rows: int, length: int) -> Batch:
    """Return rows of `length` distinct random tokens, a line break, and the same tokens again, which are to be predicted.

    Positions jump between the two, in every row by another distance. At one distance copying needs no look at the tokens: heads
    attend that many positions back, and what they learn serves neither another length nor finding what stands beside a name.
    """
    special = len(tokenizer.all_special_ids)
    line = tokenizer("\n", add_special_tokens=False)["input_ids"]
    bos = tokenizer(BOS, add_special_tokens=False)["input_ids"]
    built = []
    for _ in range(rows):
        tokens = rng.sample(range(special, len(tokenizer)), length)
        row = Row([], [], [], [], [])
        place = row.append(bos, 0, _SHARED, _NO_CHUNK) + rng.randrange(_MAX_JUMP)
        # The first token of the copy cannot be known before it is predicted from the line break: it is the oldest one.
        place = row.append([*tokens, *line], place, _SHARED, _NO_CHUNK) + rng.randrange(_MAX_JUMP)
        row.append(tokens[:-1], place, _SHARED, _NO_CHUNK)
        start = len(row.ids) - length
        row.labels[start:] = tokens
        built.append(row)
    return collate(built)


def verdict_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, rows: int, sentences: int) -> Batch:
    """Return rows of comparisons, one a line, whose verdicts are to be predicted from the two values before them."""
    line = tokenizer("\n", add_special_tokens=False)["input_ids"]
    bos = tokenizer(BOS, add_special_tokens=False)["input_ids"]
    built = []
    for _ in range(rows):
        row = Row([], [], [], [], [])
        place = row.append(bos, 0, _SHARED, _NO_CHUNK) + rng.randrange(_MAX_JUMP)
        for _ in range(sentences):
            lead, verdict = tokenizer(list(compared(rng, "train")), add_special_tokens=False)["input_ids"]
            place = row.append(lead, place, _SHARED, _NO_CHUNK)
            row.labels[-1] = verdict[0]
            place = row.append([*verdict, *line], place, _SHARED, _NO_CHUNK)
        built.append(row)
    return collate(built)


BRANCHED = "cacheblend_branched"
"""The name under which transformers knows it."""


def branched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    context_length: int | None = None,
    question_length: int = 0,
    context_lengths: Sequence[int] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the context causally, and from each question to the context and itself.

    Query, key and value are ``(batch, heads, context_length + questions * question_length, head_dim)``; `context_lengths` is what
    questions see of the context. Without `context_length`, attention is ordinary, by the mask.
    """
    # Rotary embedding may have widened the queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if context_length is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=attention_mask).transpose(1, 2), None
    query = query * scaling
    outputs = []
    for start in range(0, context_length, _BLOCK):
        end = min(start + _BLOCK, context_length)
        block = [tensor[:, :, start:end] for tensor in (query, key, value)]
        outputs.append(_Attend.apply(*block, key[:, :, :start], value[:, :, :start], None, end - start))  # type: ignore[no-untyped-call]
    if question_length:
        asked = [tensor[:, :, context_length:] for tensor in (query, key, value)]
        shared = [tensor[:, :, :context_length] for tensor in (key, value)]
        outputs.append(_Attend.apply(*asked, *shared, context_lengths, question_length))  # type: ignore[no-untyped-call]
    return torch.cat(outputs, 2).transpose(1, 2), None


class _Attend(torch.autograd.Function):
    """Attention of tokens in groups of `width` to all of some shared keys, and causally to their own group.

    The two softmaxes are taken apart and weighed by their normalizers, so that nothing as large as the scores is copied, neither
    here nor in the gradient: with heads this small the time goes into memory, not into products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        known: torch.Tensor,
        told: torch.Tensor,
        lengths: Sequence[int] | None,
        width: int,
    ) -> torch.Tensor:
        own_query, own_key, own_value = (_in_groups(tensor, width) for tensor in (query, key, value))
        own_scores = own_query @ own_key.transpose(2, 3)
        later = torch.ones(width, width, dtype=torch.bool, device=query.device).triu(1)
        own_weights, own_normalizer = _softmax(own_scores.masked_fill_(later, float("-inf")))
        own_normalizer = own_normalizer.reshape(*query.shape[:3], 1)
        out = (own_weights @ own_value).reshape(query.shape)
        weights = share = own_share = None
        if known.shape[2]:
            scores = query @ known.transpose(2, 3).contiguous()
            for row, length in enumerate(lengths or ()):
                scores[row, :, :, length:] = float("-inf")
            weights, normalizer = _softmax(scores)
            whole = torch.logaddexp(normalizer, own_normalizer)
            share, own_share = (torch.exp(part - whole).to(out.dtype) for part in (normalizer, own_normalizer))
            out = weights @ told * share + out * own_share
        ctx.save_for_backward(query, key, value, known, told, out, weights, own_weights, share, own_share)
        ctx.width = width
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, known, told, out, weights, own_weights, share, own_share = ctx.saved_tensors
        gradient = gradients[0]
        mean = (gradient * out).sum(-1, keepdim=True)
        if weights is None:
            own_gradient, own_mean = gradient, mean
            of_known = of_told = None
            of_query = torch.zeros_like(query)
        else:
            own_gradient, own_mean = gradient * own_share, mean * own_share
            gradient, mean = gradient * share, mean * share
            of_scores = (gradient @ told.transpose(2, 3).contiguous()).sub_(mean).mul_(weights)
            of_query = of_scores @ known
            of_known = of_scores.transpose(2, 3) @ query
            of_told = weights.transpose(2, 3) @ gradient
        asked, heard, said = (_in_groups(tensor, ctx.width) for tensor in (query, key, value))
        own_gradient, own_mean = (_in_groups(tensor, ctx.width) for tensor in (own_gradient, own_mean))
        of_own_scores = (own_gradient @ said.transpose(2, 3)).sub_(own_mean).mul_(own_weights)
        of_query = of_query + (of_own_scores @ heard).reshape(query.shape)
        of_key = (of_own_scores.transpose(2, 3) @ asked).reshape(query.shape)
        of_value = (own_weights.transpose(2, 3) @ own_gradient).reshape(query.shape)
        return of_query, of_key, of_value, of_known, of_told, None, None


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax over the last dimension and the logarithms of its normalizers, which the largest entries tell."""
    weights = torch.softmax(scores, -1)
    largest, likeliest = (tensor.amax(-1, keepdim=True).float() for tensor in (scores, weights))
    return weights, largest - likeliest.log()


def _in_groups(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Lay groups of tokens, ``(batch, heads, groups * width, size)``, beside the heads: they do not see each other."""
    return tensor.reshape(tensor.shape[0], -1, width, tensor.shape[3])


AttentionInterface.register(BRANCHED, branched_attention)
