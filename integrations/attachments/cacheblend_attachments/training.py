"""Training a preamble: chunks are encoded after KV that makes the model answer from them as it does by full prefill."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.preamble import TrainedPreamble
from cacheblend_rag.rope import Rotation, shift_layer

__all__ = ["PreambleTrainer"]

_MARK = "\u2021content\u2021"
_INSTRUCTION = "Answer from the context.\n\n"
_QUOTES = (
    "Write out the sentence that starts with: {}",
    "Continue this sentence from the context exactly: {}",
    "Quote the passage that begins: {}",
    'What does the text say after "{}"?',
)
_GOES_ON = "How does the text go on that ends with: {}"
_CHUNK_TOKENS = (60, 160)
_PAIRS = 3
"""Neighbours of one document that a prompt has; a retriever returns several of a document, and several documents."""
_QUOTED_TOKENS = (6, 16)
_ANSWER_TOKENS = 20
_LEAST_TOKENS = 4 * _CHUNK_TOKENS[1]
_WARM_STEPS = 10

Layers = list[LayerKV]


class _Task(NamedTuple):
    """A prompt's chunks, each pair read in one go, in which order they stand in it, and questions with their answers."""

    pairs: list[list[list[int]]]
    order: list[int]
    questions: list[tuple[list[int], list[int]]]


class PreambleTrainer:
    """Trains a preamble's KV by self-distillation on documents, without questions or answers to them.

    Each step draws chunks of the documents and asks the model to quote them, and to go on where they end. Its answers from
    the chunks' own KV, encoded after the preamble and moved, are to be those of full prefill: the gradient of their divergence
    reaches the preamble's keys and values through both; the model stays as it is. KV Packet distils soft tokens around each
    chunk in the same way; these are in no prompt, since the preamble is dropped from what is stored.

    Parameters
    ----------
    engine : BlendEngine
        An engine whose model can be blended. Training goes on from its preamble.
    texts : sequence of str
        The documents.
    steps : int
        How many steps there will be; the learning rate falls until then.
    seed : int
        Of what is drawn.
    learning_rate : float
        Of Adam, in units of each layer's own keys and values (root mean square).

    Raises
    ------
    ConfigError
        If the documents have too little text.
    UnsupportedModelError
        If the model cannot be blended.
    """

    def __init__(
        self, engine: BlendEngine, texts: Sequence[str], *, steps: int, seed: int = 0, learning_rate: float = 0.01
    ) -> None:
        lexer = lexer_of(engine.tokenizer)
        self._model, self._tokenizer = engine.model, engine.tokenizer
        self._start = engine.preamble()
        self._rotations: tuple[Rotation | None, ...] = engine.card().rotations
        self._scheduler = scheduler_of(engine.model)
        self._head, self._end, self._end_breaks = self._frame()
        room = _CHUNK_TOKENS[1] if engine.window is None else (engine.window - len(self._head)) // (2 * _PAIRS + 2)
        self._lengths = [min(length, room) for length in _CHUNK_TOKENS]
        documents = [lexer.read(text)[0] for text in texts]
        self._documents = [each for each in documents if len(each) >= self._lengths[1]]
        if sum(map(len, self._documents)) < _LEAST_TOKENS:
            raise ConfigError(
                f"the documents have {sum(map(len, documents))} tokens; {_LEAST_TOKENS} or more are needed to train a preamble"
            )
        self._random = random.Random(seed)
        self._scales = [[part.pow(2).mean().sqrt() for part in layer] for layer in self._start.kv]
        self._changes = [[torch.zeros_like(part, requires_grad=True) for part in layer] for layer in self._start.kv]
        flat = [each for layer in self._changes for each in layer]
        self._optimizer = torch.optim.Adam(flat, lr=learning_rate, betas=(0.9, 0.98))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: min(1, (step + 1) / _WARM_STEPS) * (1 + math.cos(math.pi * min(1, step / steps))) / 2,
        )

    def step(self) -> float:
        """Learn from one prompt; returns its divergence before that, in nats a token."""
        with self._alone(), torch.enable_grad():
            divergence = self._divergence(self._task(self._random))
            self._optimizer.zero_grad()
            divergence.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._schedule.step()
        return divergence.item()

    def divergence(self, prompts: int = 8) -> float:
        """Return the mean divergence from full prefill over prompts that are the same in each call, in nats a token."""
        drawn = random.Random(-1)
        tasks = [self._task(drawn) for _ in range(prompts)]
        with self._alone(), torch.no_grad():
            return sum(self._divergence(task).item() for task in tasks) / prompts

    def preamble(self) -> TrainedPreamble:
        """Return the preamble as it is now."""
        with torch.no_grad():
            layers = tuple(LayerKV(*(part.clone() for part in layer)) for layer in self._layers())
        return TrainedPreamble(self._start.token_ids, layers, self._start.model)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the model for a step, and no gradients of its weights."""
        weights = [each for each in self._model.parameters() if each.requires_grad]
        with self._scheduler:
            for each in weights:
                each.requires_grad_(False)
            try:
                yield
            finally:
                for each in weights:
                    each.requires_grad_(True)

    def _layers(self) -> Layers:
        return [
            LayerKV(*(part + change * scale for part, change, scale in zip(*each, strict=True)))
            for each in zip(self._start.kv, self._changes, self._scales, strict=True)
        ]

    def _frame(self) -> tuple[list[int], list[int], bool]:
        """Return what stands before a prompt's chunks, and between a question and its answer, and whether a blank ends it."""
        tokenizer, lexer = self._tokenizer, lexer_of(self._tokenizer)
        before, after = "", "\n\nAnswer:"
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": _MARK}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            before, _, after = text.partition(_MARK)
        head = lexer.read(before + _INSTRUCTION, begins=True)[0]
        bos = getattr(tokenizer, "bos_token_id", None)
        head = head if bos is None or head[:1] == [bos] else [bos, *head]
        return head, lexer.read(after)[0], after[-1:].isspace()

    def _task(self, draw: random.Random) -> _Task:
        pairs, questions = [], []
        for document in draw.choices(self._documents, [len(each) for each in self._documents], k=_PAIRS):
            lengths = [draw.randint(*self._lengths) for _ in range(2)]
            start = draw.randrange(max(1, len(document) - sum(lengths) - _ANSWER_TOKENS))
            middle, end = start + lengths[0], start + sum(lengths)
            pair = [piece for piece in (document[start:middle], document[middle:end]) if piece]
            pairs.append([self._as_text(piece, after="\n\n") for piece in pair])
            piece = draw.choice(pair)
            count = min(draw.randint(*_QUOTED_TOKENS), len(piece) // 2)
            at = draw.randrange(max(1, len(piece) - count - _ANSWER_TOKENS))
            questions.append(self._question(draw.choice(_QUOTES), piece[at : at + count], piece[at + count :]))
            rest = document[end:]
        if rest:
            questions.append(self._question(_GOES_ON, pair[-1][-_QUOTED_TOKENS[1] :], rest))
        order = list(range(sum(map(len, pairs))))
        draw.shuffle(order)
        return _Task(pairs, order, [each for each in questions if each[1]])

    def _question(self, form: str, quoted: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        text = form.format(self._tokenizer.decode(quoted).strip())
        before = "" if self._end_breaks else " "
        written = self._as_text(answer[:_ANSWER_TOKENS], before)
        return lexer_of(self._tokenizer).read(f"Question: {text}")[0] + self._end, written

    def _as_text(self, ids: list[int], before: str = "", after: str = "") -> list[int]:
        """Tokenise what tokens say as a text of its own, as a chunk and an answer are."""
        return lexer_of(self._tokenizer).read(f"{before}{self._tokenizer.decode(ids).strip()}{after}")[0]

    def _divergence(self, task: _Task) -> torch.Tensor:
        """Return the Kullback-Leibler divergence of the answers from full prefill's, in nats a token."""
        with torch.no_grad():
            _, head = self._read(self._head)
            chunks = [piece for pair in task.pairs for piece in pair]
            _, whole = self._read([token for number in task.order for token in chunks[number]], head)
            wanted = [self._answers(whole, *each) for each in task.questions]
        context = self._joined(head, [self._encoded(pair) for pair in task.pairs], task.order)
        parts = [
            (full.exp() * (full - self._answers(context, *each))).sum(-1)
            for full, each in zip(wanted, task.questions, strict=True)
        ]
        return torch.cat(parts).mean()

    def _encoded(self, pair: list[list[int]]) -> list[tuple[int, Layers]]:
        """Return the position and the KV of each piece of a document, read in one go after the preamble."""
        _, layers = self._read([token for piece in pair for token in piece], self._layers())
        found, start = [], len(self._start.token_ids)
        for piece in pair:
            end = start + len(piece)
            found.append((start, [LayerKV(*(part[:, :, start:end] for part in layer)) for layer in layers]))
            start = end
        return found

    def _joined(self, head: Layers, pairs: list[list[tuple[int, Layers]]], order: list[int]) -> Layers:
        """Return the KV of a prompt's head and chunks, these moved to where they stand in it."""
        chunks = [chunk for pair in pairs for chunk in pair]
        layers, place = [[layer] for layer in head], len(self._head)
        for encoded_at, kv in (chunks[number] for number in order):
            for parts, layer, rotation in zip(layers, kv, self._rotations, strict=True):
                parts.append(_moved(layer, rotation, place - encoded_at))
            place += kv[0].keys.shape[2]
        return [LayerKV(*(torch.cat(part, dim=2) for part in zip(*parts, strict=True))) for parts in layers]

    def _answers(self, context: Layers, question: list[int], answer: list[int]) -> torch.Tensor:
        """Return log-probabilities at each token of an answer, ``(len(answer), vocab)``."""
        logits, _ = self._read(question + answer, context, len(answer) + 1)
        return logits[0, :-1].float().log_softmax(-1)

    def _read(self, ids: list[int], past: Sequence[LayerKV] = (), count: int = 1) -> tuple[torch.Tensor, Layers]:
        """Read tokens after KV; returns the last `count` logits and the KV of everything."""
        cache, model = DynamicCache(), self._model
        for number, layer in enumerate(past):
            cache.update(layer.keys.to(model.dtype), layer.values.to(model.dtype), number)
        tokens = torch.tensor([ids], device=model.device)
        kept = {"logits_to_keep": count} if model._supports_logits_to_keep() else {}  # type: ignore[operator]  # as generate asks
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, **kept)
        layers: list[Any] = cache.layers
        return out.logits[:, -count:], [LayerKV(layer.keys, layer.values) for layer in layers]


def _moved(layer: LayerKV, rotation: Rotation | None, distance: int) -> LayerKV:
    if rotation is None:
        return layer
    moved = LayerKV(*(part.clone() for part in layer))
    shift_layer(moved, rotation.table(torch.full((layer.keys.shape[2],), distance), layer.keys.device))
    return moved
