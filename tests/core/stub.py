"""A backend that computes nothing: KV of zeros, and answers that repeat the prompt's last text."""

import time
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from cacheblend_rag import BlendConfig
from cacheblend_rag.chunk import context_digest
from cacheblend_rag.encode import ChunkEncoder, Target
from cacheblend_rag.engine import GenerationResult
from cacheblend_rag.engine.backend import Backend, Scheduler
from cacheblend_rag.engine.decode import Outputs
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ChunkReadError, ConfigError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import ModelCard
from cacheblend_rag.selection import make_selection, make_selector

_LAYERS = 2


def zeros(count: int) -> list[LayerKV]:
    return [LayerKV(torch.zeros(1, count, 4), torch.zeros(1, count, 4)) for _ in range(_LAYERS)]


class ZeroEncoder(ChunkEncoder):
    """Says that the KV of every token is zero."""

    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        for batch in self.plan(targets):
            yield [(index, self._kv(targets[index])) for index in batch]

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        return ChunkKV(tuple(token_ids), 0, zeros(len(token_ids)))

    def _kv(self, target: Target) -> ChunkKV:
        ids = target.token_ids
        return ChunkKV(ids, len(self.preamble), zeros(len(ids)), context_digest(target.context))


class EchoBackend(Backend):
    """Has no model."""

    def __init__(self, tokenizer: Any) -> None:
        self.name, self.tokenizer, self.window = "echo", tokenizer, 512
        self.num_layers = self.num_kv_layers = _LAYERS
        self.num_embeddings = len(tokenizer)
        self.form = ModelCard("", self.window, torch.float32, ((1, 4, 4),) * _LAYERS, (None,) * _LAYERS)
        self.scheduler, self.shelf = Scheduler(), WeakSet()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return (self.tokenizer.eos_token_id,)

    def identity(self, *, private: bool) -> str:
        del private
        return "echo"

    def encoder(self, preamble: tuple[int, ...]) -> ZeroEncoder:
        return ZeroEncoder(self.form, preamble, 256)

    def check_blend(self, blend: BlendConfig) -> None:
        selector = make_selector(blend.selector).name
        if selector not in ("boundary", "random"):
            raise ConfigError(f"the selector {selector} looks into layers, and an echo has none; give another")

    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        if options:
            raise ConfigError(f"{next(iter(options))!r} is no option of an echo; leave it out")
        return options

    def cut(self, kv: Any, rows: int) -> Any:
        raise AssertionError("no prompt was kept")

    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        for request in requests:
            try:
                yield request, self._answer(request)
            except Exception as error:  # handed to who asked
                yield request, error

    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        said = self._read(request)
        return torch.nn.functional.one_hot(torch.tensor(said[:1] * count), self.num_embeddings).float()

    def _answer(self, request: Request) -> GenerationResult | Exception:
        ids = self._read(request)[: request.max_new_tokens]
        outputs = Outputs(self.tokenizer, [request], [len(ids)], self.end_ids)
        prompt = list(request.prompt.layout.token_ids)
        for count in range(len(ids)):
            outputs(torch.tensor([prompt + ids[: count + 1]]), None)
        outputs.finish([ids])
        return outputs.result(0, self.num_layers)

    def _read(self, request: Request) -> list[int]:
        """Return the tokens behind a prompt's last chunk, which is read as if it was prefilled."""
        self.scheduler.take(None, request.deadline, lambda: request.is_given_up)
        try:
            while True:
                try:
                    return self._prefill(request)
                except ChunkReadError as error:
                    # It is a miss the next time.
                    request.supply.note_unreadable(request, error)
        finally:
            self.scheduler.leave()

    def _prefill(self, request: Request) -> list[int]:
        layout, state = request.prompt.layout, request.state
        if not request.blend.is_full and request.prompt.chunks:
            for reader in request.supply.readers(request).values():
                for index in range(reader.num_layers):
                    reader.layer(index)
            state.selection = make_selection(request.blend, layout, self.num_layers)
            state.recomputed = state.selection.rows
            state.charge = float(state.recomputed.numel() * self.num_layers)
        else:
            state.fallback_reason = request.chunkless if request.blend.enabled else None
            request.supply.note_held(request, [chunk.key for chunk in request.prompt.chunks])
        state.forward_started = time.perf_counter()
        return list(layout.token_ids[max((span.stop for span in layout.chunks), default=0) :])
