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

from cacheblend_rag.lab.training.corpus import Example
from cacheblend_rag.lab.training.questions import compared
from cacheblend_rag.reference.prompt import BOS, PromptFormat

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
# Contexts of up to so many tokens attend by products written out, longer ones by the fused kernel, which on CPUs is the slower of
# the two before and the quicker one after (bfloat16, head size 32: by a fifth at 384 tokens, twice as quick at 1,536).
_WRITTEN_OUT = 512


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

    def question_mask(self, heads: int) -> torch.Tensor:
        """Return what is added to each question's scores, ``(batch * heads * questions, 1, question, context + question)``."""
        count, width = self.ids.shape[0], self.question_length
        real = self.branches != _PADDING
        context = real[:, : self.context_length]
        own = real[:, self.context_length :].reshape(-1, width)
        questions = own.shape[0] // count
        seen = torch.cat([context.repeat_interleave(questions, 0), own], 1)[:, None].repeat(1, width, 1)
        seen[:, :, self.context_length :] &= torch.ones(width, width, dtype=torch.bool, device=seen.device).tril()
        # A question that is all padding sees the context, for a row of the softmax must not be empty.
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device=seen.device).masked_fill(~seen, float("-inf"))
        # A 4-D mask is what transformers hands through untouched.
        return mask.view(count, 1, questions, *mask.shape[1:]).expand(-1, heads, -1, -1, -1).flatten(0, 2)[:, None]

    def mask(self, reuse: bool = False) -> torch.Tensor:
        """Return which token sees which, as a boolean tensor ``(batch, 1, seq_len, seq_len)``.

        Parameters
        ----------
        reuse
            Let chunk tokens see only BOS and their own chunk: what plain reuse of chunk KV amounts to.
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

    def firsts(self) -> torch.Tensor:
        """Return which of the tokens that are to be predicted are the first of an answer, as booleans in their order."""
        wanted = self.labels != IGNORED
        before = torch.nn.functional.pad(wanted[:, :-1] & (self.branches[:, 1:] == self.branches[:, :-1]), (1, 0))
        return (wanted & ~before)[wanted]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.type == "torch.Tensor"}
        return replace(self, **moved)


def encode_example(tokenizer: PreTrainedTokenizerFast, example: Example, form: PromptFormat, gap: int = 0) -> Row:
    """Encode an example the way the engine assembles a prompt: piece by piece, each chunk on its own.

    Parameters
    ----------
    tokenizer
        The reference tokenizer.
    example
        A context and its questions.
    form
        The prompt format.
    gap
        Positions to leave out after the head, so that the model does not get used to one length.
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
    attend so many positions back, and what they learn serves neither another length nor finding what stands beside a name.
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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the context causally, and from each question to the context and itself.

    Parameters
    ----------
    module
        The attention module (unused).
    query, key, value
        ``(batch, heads, context_length + questions * question_length, head_dim)``.
    attention_mask
        :meth:`Batch.question_mask`, or None without questions; where `context_length` is None, a mask over all tokens.
    scaling
        What scores are multiplied by.
    context_length, question_length
        The grid's measures; None asks for ordinary attention.
    **kwargs
        What transformers passes besides (unused).

    Returns
    -------
    tuple
        The output ``(batch, tokens, heads, head_dim)``, and no weights.
    """
    # Rotary embedding may have widened the queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if context_length is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=attention_mask).transpose(1, 2), None
    count, heads, _, size = query.shape
    query = query * scaling
    context = [tensor[:, :, :context_length].flatten(0, 1) for tensor in (query, key, value)]
    if context_length > _WRITTEN_OUT:
        asked, known, told = (tensor[:, :, :context_length] for tensor in (query, key, value))
        output = scaled_dot_product_attention(asked, known, told, is_causal=True, scale=1.0).flatten(0, 1)
    else:
        causal = torch.ones(context_length, context_length, dtype=torch.bool, device=query.device).tril()
        scores = context[0] @ context[1].transpose(1, 2)
        output = torch.softmax(scores.masked_fill(~causal, float("-inf")), -1) @ context[2]
    if attention_mask is not None:
        together = query[:, :, context_length:].flatten(0, 1)
        own = [tensor[:, :, context_length:].reshape(-1, question_length, size) for tensor in (query, key, value)]
        on_context = (together @ context[1].transpose(1, 2)).view(-1, question_length, context_length)
        on_question = own[0] @ own[1].transpose(1, 2)
        weights = torch.softmax(torch.cat([on_context, on_question], 2) + attention_mask[:, 0], -1)
        answers = weights[:, :, :context_length].reshape(count * heads, -1, context_length) @ context[2]
        answers = answers + (weights[:, :, context_length:] @ own[2]).view_as(answers)
        output = torch.cat([output, answers], 1)
    return output.view(count, heads, -1, size).transpose(1, 2), None


AttentionInterface.register(BRANCHED, branched_attention)
