"""The chunks of a model that vLLM serves: this process has its tokenizer, and its weights nowhere; vLLM computes KV itself."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend_rag.config import EngineConfig, Tuning
from cacheblend_rag.encode import ChunkEncoder, Target
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.engine.backend import EncodingModel, Scheduler
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVStore
from vllm_cacheblend.spooling import read_spool, remove_spool, spool_folder

__all__ = ["VLLMEncoder", "VLLMLibrary", "Warm"]


Warm = Callable[[Sequence[tuple[str, tuple[int, ...]]], str, bool], None]
"""Has vLLM compute prompts, each with `spool_params` of its name, and returns when all are done.

It gets names and token ids; the `cache_salt` of all, since vLLM shares what it computes among prompts of equal salts only; and
whether an answer waits for them: others come after all that are answered.
"""


class VLLMEncoder(ChunkEncoder):
    """Computes the KV of chunks by requests to vLLM, one for each text that is read in one go.

    What two readings of one encoder begin with alike vLLM's own prefix cache has.
    """

    def __init__(self, card: ModelCard, preamble: Sequence[int], batch_tokens: int, spool: Path, warm: Warm) -> None:
        super().__init__(card, preamble, batch_tokens)
        self._heads = [heads for heads, _, _ in card.shapes]
        self._spool = spool
        self._warm = warm
        # A secret: how long a text takes must not tell one tenant what another has added.
        self._salt = secrets.token_hex(16)

    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        if any(target.positions is not None for target in targets):
            raise PromptError(
                "the chunks have positions, as in a schema, but vLLM places tokens one after the other; add "
                "them through an engine in this process"
            )
        for batch in self.batches(targets):
            steps = [step for reading in batch for step in reading]
            read = self._read([self.preamble + sequence for sequence, _ in steps])
            yield [
                (index, self.cut_out(layers, targets[index]))
                for (_, indices), layers in zip(steps, read, strict=True)
                for index in indices
            ]

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        [layers] = self._read([tuple(token_ids)], is_awaited=True)
        return ChunkKV(tuple(token_ids), 0, layers)

    def _read(self, prompts: Sequence[tuple[int, ...]], is_awaited: bool = False) -> Iterator[list[LayerKV]]:
        names = [uuid.uuid4().hex for _ in prompts]
        try:
            self._warm(list(zip(names, prompts, strict=True)), self._salt, is_awaited)
            for name in names:
                yield read_spool(self._spool, name, self._heads)
        finally:
            # What was written before one of them failed.
            for name in names:
                remove_spool(self._spool, name)


class _NoLock(Scheduler):
    """Lets all requests in: vLLM orders what it is asked for, and an answer must not wait for background work."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    @contextmanager
    def after_others(self, patience_s: float | None = None) -> Iterator[None]:
        yield


class _VLLMModel(EncodingModel):
    """The model that vLLM has: its card says all that is known of it here."""

    def __init__(self, card: ModelCard, tokenizer: Any, num_embeddings: int | None, spool: Path, warm: Warm) -> None:
        self.tokenizer, self.form, self.window, self.num_kv_layers = tokenizer, card, card.window, card.num_kv_layers
        self.num_embeddings = len(tokenizer) if num_embeddings is None else num_embeddings
        self.scheduler = _NoLock()
        self._card, self._spool, self._warm = card, spool, warm

    def identity(self, *, private: bool) -> str:
        return self._card.identity

    def encoder(self, preamble: tuple[int, ...]) -> VLLMEncoder:
        return VLLMEncoder(self._card, preamble, Tuning().encode_batch_tokens, self._spool, self._warm)


class VLLMLibrary(ChunkLibrary):
    """Names, encodes and stores chunks for vLLM, which computes their KV itself; a context manager.

    The store is the folder that vLLM was told of, and who opened it closes it. Of tokens the model knows `num_embeddings`, from 0
    on, by default as many as its tokenizer; any other ends vLLM.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Any,
        store: KVStore,
        warm: Warm,
        *,
        config: EngineConfig | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        if store.path is None:
            raise ConfigError("the store is in RAM alone, where vLLM cannot see it; open it in a folder")
        model = _VLLMModel(card, tokenizer, num_embeddings, spool_folder(store.path), warm)
        super().__init__(model, store, EngineConfig.of(config), Tuning())
        self.card = card
        self._parts = (store, warm)
        self._num_embeddings = num_embeddings

    def for_tenant(self, tenant: str) -> VLLMLibrary:
        """Return the library of another tenant over this one's store and server; close it before this one."""
        config = self.config.replace(tenant=tenant)
        return VLLMLibrary(self.card, self.tokenizer, *self._parts, config=config, num_embeddings=self._num_embeddings)
