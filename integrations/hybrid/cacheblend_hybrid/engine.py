"""The engine of models with recurrent layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cacheblend_hybrid.runner import StateRunner, states_of
from cacheblend_hybrid.states import States
from cacheblend_rag.chunk import Chunk, chunk_list, id_list
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model import Decoder, state_layers

__all__ = ["HybridEngine"]

logger = logging.getLogger(__name__)


class HybridEngine(BlendEngine):
    """Answers prompts with a model some of whose layers keep a state instead of KV for each token, which cannot be moved.

    Such a model cannot be blended: what it has read of a chunk serves where the same text stands before it, and nowhere else.
    Served is a prompt that begins with a head and right behind it has a document that was added, whole or its first chunks: the
    state at the end of these is stored, the next time the model goes on from there, and what it computes is what it would compute
    by itself. Every other prompt is read in full, and its report says what it lacks. Unless the head is fixed (`FixedText`), the
    state stays in RAM.

    `BlendEngine` makes it of such a model where this distribution is installed. The parameters are those of `BlendEngine`, and so
    are the methods; `heads` lists the states as well. Prompts are answered one after the other.

    Raises
    ------
    UnsupportedModelError
        If ``config.strict`` is set, since the model cannot be blended.
    """

    _states: States | None = None

    def _make_runner(self) -> Runner:
        if self._states is None:
            return super()._make_runner()
        return StateRunner(
            self.model,
            None,
            self.unsupported_reason,
            self._supply,
            self.tuning,
            self._prefixes,
            states=self._states,
            tokenizer=self.tokenizer,
            namespace=self.namespace,
            tenant=self.config.tenant or "",
        )

    def _look_at_model(self) -> tuple[Decoder | None, str | None]:
        kinds = ", ".join(state_layers(self.model))
        reason = f"{type(self.model).__name__} has layers of type {kinds}, which keep no KV for each token"
        if self.config.strict:
            raise UnsupportedModelError(reason)
        try:
            with scheduler_of(self.model):
                self._states = States(self.model)
        except UnsupportedModelError as error:
            reason = f"{reason}; {error}"
        served = "only a document after a head is reused, other" if self._states else "its"
        logger.warning("%s; %s prompts are prefilled in full", reason, served)
        return None, reason

    def _last_logits(self, request: Request, count: int) -> torch.Tensor:
        if count > 1:
            # After a state, the last token alone is computed as the model's own forward does it.
            request = replace(request, blend=request.blend.replace(enabled=False))
        return super()._last_logits(request, count)

    def add(self, chunks: Iterable[Chunk], **options: Any) -> Any:
        chunks = chunk_list(chunks)
        ids = [chunk.id for chunk in chunks if chunk.id is not None]
        documents = {each.document for each in (*chunks, *self.records(ids)) if each is not None} - {None}
        ids += [id for name in documents for id in self.document(str(name))]
        beginnings, known = self._beginnings(ids), self.records(ids)
        try:
            return super().add(chunks, **options)
        finally:
            both = zip(beginnings, known, self.records(ids), strict=True)
            changed = {begin for begin, old, new in both if old and (not new or new.token_ids != old.token_ids)}
            self._store.forget(self.namespace, self._states_named(changed))

    def delete(self, ids: Iterable[str]) -> int:
        ids = id_list(ids)
        return super().delete([*ids, *self._states_named(self._beginnings(ids))])

    def _beginnings(self, ids: Sequence[str]) -> list[str]:
        """Return what the names of the stored states that hold each chunk begin with."""
        return [
            states_of(id, None if each is None else each.document)
            for id, each in zip(ids, self.records(ids), strict=True)
        ]

    def _states_named(self, beginnings: Iterable[str]) -> list[str]:
        names = self._store.names
        return [name for begin in set(beginnings) for name in names.beginning(self.namespace, begin)]
