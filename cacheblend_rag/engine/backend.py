"""Interface of a model behind an engine: what is known of it, and how prompts are computed."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakSet

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.encode import ChunkEncoder
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.prefixes import PrefixCache

__all__ = ["Backend", "engine_class"]

logger = logging.getLogger(__name__)


class Backend(ABC):
    """A model that one engine asks; `BlendEngine` is given one in place of a model of transformers.

    Its parts are set by its constructor, but for `supply` and `prefixes`, which are its engine's.

    For each request it fills in what `make_report` reads: in `Request.state` the `selection`, or why there is none
    (`fallback_reason`); `hits` and `fates` of the chunks, which `KVSupply` does; `recomputed` and `charge`, unless the prompt was
    computed in full; `forward_started`; and in `figures` what else `BlendReport` has.
    """

    name: str
    tokenizer: Any
    # Model of transformers, if it is one.
    model: Any = None
    # Most tokens that it can read and write; None for any number.
    window: int | None
    # How a prompt beyond the window could be taken, where anything but a shorter one helps.
    window_hint: str = ""
    # Form of its KV; None where there is none to store, as `reason` says.
    form: Decoder | ModelCard | None
    reason: str | None = None
    num_layers: int
    num_kv_layers: int
    num_embeddings: int
    scheduler: Scheduler
    # What all engines over the model keep of earlier prompts.
    shelf: WeakSet[PrefixCache]
    supply: KVSupply
    prefixes: PrefixCache
    attachments: list[Attachment]

    @property
    @abstractmethod
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @abstractmethod
    def identity(self, *, private: bool) -> str:
        """Return a digest of weights and tokenizer; any unique one for a store that no other process sees."""

    @abstractmethod
    def encoder(self, preamble: tuple[int, ...]) -> ChunkEncoder | None:
        """Return what computes chunks' KV behind a preamble; None where KV is not stored."""

    def check_model(self) -> None:
        """Raise `ConfigError` if the model was changed since it was made."""
        return

    @abstractmethod
    def check_blend(self, blend: BlendConfig) -> None:
        """Raise `ConfigError` if prompts cannot be blended so."""

    @abstractmethod
    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of decoding that say something; `ConfigError` for those that cannot be had."""

    @abstractmethod
    def cut(self, kv: Any, rows: int) -> Any:
        """Return the first rows of the KV of an earlier prompt; with 0 it is let go."""

    @abstractmethod
    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        """Answer prompts whose options differ in objects only, at most `batch_size` together; yield each with what came of it."""

    @abstractmethod
    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        """Prefill a prompt; return its last ``(count, vocab)`` logits, on the CPU."""


def engine_class(model: Any) -> Any:
    """Return the installed engine that claims a model (a name, a path, or what transformers has loaded); None if none does.

    The entry points of ``cacheblend_rag.engines`` are classes with a method ``claims(model)``.
    """
    for point in entry_points(group="cacheblend_rag.engines"):
        try:
            engine = point.load()
        except ImportError as error:
            logger.warning("the engine %r is installed, but not what it needs: %s", point.name, error)
            continue
        if engine.claims(model):
            return engine
    return None
