"""The chunks of a model that vLLM serves: this process has its tokenizer, and its weights nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.engine.scheduler import Patience, Scheduler
from cacheblend_rag.model import ModelCard
from cacheblend_rag.store import KVStore
from cacheblend_rag.tuning import Tuning
from vllm_cacheblend.encoding import VLLMEncoder, Warm

__all__ = ["VLLMLibrary"]


class _NoLock(Scheduler):
    """Lets all requests in: vLLM orders what it is asked for, and an answer must not wait for background work."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass

    @contextmanager
    def within(self, patience: Patience) -> Iterator[None]:
        yield

    @contextmanager
    def after_others(self) -> Iterator[None]:
        yield


class VLLMLibrary(ChunkLibrary):
    """Names, encodes and stores chunks for vLLM, which computes their KV itself; a context manager.

    Parameters
    ----------
    card : ModelCard
        What `BlendEngine.card` returned of the model, on any machine.
    tokenizer : Any
        Its tokenizer.
    store : KVStore
        The store that vLLM was told of; who opened it closes it.
    spool : Path
        The folder that vLLM writes to.
    warm : Warm
        Asks vLLM to compute prompts.
    config : EngineConfig, optional
        The settings; by default those of the environment.
    tuning : Tuning, optional
        How much is asked for at once.
    num_embeddings : int, optional
        How many tokens the model knows, from 0 on; by default as many as its tokenizer. Any other ends vLLM.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Any,
        store: KVStore,
        spool: Path,
        warm: Warm,
        *,
        config: EngineConfig | None = None,
        tuning: Tuning | None = None,
        num_embeddings: int | None = None,
    ) -> None:
        config, tuning = EngineConfig.of(config), tuning or Tuning()
        super().__init__(
            tokenizer,
            card.identity,
            card,
            card.window,
            store,
            config,
            tuning,
            lambda preamble: VLLMEncoder(card, preamble, tuning.encode_batch_tokens, spool, warm),
            card.num_kv_layers,
            _NoLock(),
            num_embeddings,
        )
        self.card = card
        self._parts = (store, spool, warm)
        self._options: dict[str, Any] = {"tuning": tuning, "num_embeddings": num_embeddings}

    def for_tenant(self, tenant: str) -> VLLMLibrary:
        """Return the library of another tenant over this one's store and server; close it before this one."""
        config = self.config.replace(tenant=tenant)
        return VLLMLibrary(self.card, self.tokenizer, *self._parts, config=config, **self._options)

    def _check_model(self) -> None:
        # vLLM refuses to start with another model than the card's.
        pass
