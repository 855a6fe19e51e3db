"""The engine of models with recurrent layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cacheblend_hybrid.runner import StateRunner, source_of
from cacheblend_hybrid.states import States
from cacheblend_rag.chunk import BlendPrompt, Chunk, chunk_list, id_list
from cacheblend_rag.engine import BlendEngine, PrefillResult
from cacheblend_rag.engine.many import Many
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model import Capability, Decoder, state_layers

__all__ = ["HybridEngine"]

logger = logging.getLogger(__name__)


class HybridEngine(BlendEngine):
    """Answers prompts with a model some of whose layers keep a state instead of KV for each token, which cannot be moved.

    Such a model cannot be blended: what it has read of a chunk serves where the same text stands before it, and nowhere else.
    Served is a prompt that begins with a head and right behind it has a document, whole or its first chunks: the state at the end
    of these is stored, the next time the model goes on from there, and what it computes is what it would compute by itself. Every
    other prompt is read in full, and its report says what it lacks. Unless the head is fixed (`FixedText`) and the document was
    added, the state stays in RAM.

    `BlendEngine` makes it of such a model where this distribution is installed. The parameters are those of `BlendEngine`, and so
    are the methods; `heads` lists the states as well. Prompts are answered one after the other.

    Raises
    ------
    UnsupportedModelError
        If ``config.strict`` is set, since the model cannot be blended.
    """

    _states: States | None = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self._states is None:
            return
        assert self.unsupported_reason is not None
        # Which chunk is the first of a document is wanted though none is encoded.
        self._assembler.reads_documents = True
        self._runner = StateRunner(
            self.model,
            self.unsupported_reason,
            self._supply,
            self.tuning,
            self._prefixes,
            self._states,
            self.tokenizer,
            self.namespace,
            self.config.tenant or "",
        )
        self._many = Many(self.model, self.tokenizer, None, self._runner, self.tuning)

    def _look_at_model(self) -> tuple[Decoder | None, str | None]:
        kinds = ", ".join(state_layers(self.model))
        reason = f"{type(self.model).__name__} has layers of type {kinds}, which keep no KV for each token"
        if self.config.strict:
            raise UnsupportedModelError(reason)
        try:
            with scheduler_of(self.model):
                self._states = States(self.model)
        except UnsupportedModelError as error:
            logger.warning("%s; its prompts are prefilled in full, for %s", reason, error)
            return None, f"{reason}; {error}"
        logger.warning("%s; only a document after a head is reused, other prompts are prefilled in full", reason)
        return None, reason

    def capability(self) -> Capability:
        seen = super().capability()
        if self._states is None:
            return seen
        served = "none: it goes on from the end of a document behind a head"
        return replace(seen, layers=tuple(replace(layer, blending=served) for layer in seen.layers))

    def prefill(self, prompt: BlendPrompt, *, logits_to_keep: int | None = None, **options: Any) -> PrefillResult:
        if logits_to_keep not in (None, 1):
            # After a state, the last token alone is computed as the model's own forward does it.
            options["blend"] = self.check_blend(options.get("blend") or self.blend).replace(enabled=False)
        return super().prefill(prompt, logits_to_keep=logits_to_keep, **options)

    def add(self, chunks: Iterable[Chunk], **options: Any) -> Any:
        self._check_open()
        chunks, names = chunk_list(chunks), self._store.names
        given = [chunk.id for chunk in chunks if chunk.id is not None]
        documents = {*(chunk.document for chunk in chunks), *names.documents(self.namespace, given)} - {None}
        ids = [*given, *(id for name in documents for id in names.document(self.namespace, str(name)))]
        known, stood = names.lookup(self.namespace, ids), names.documents(self.namespace, ids)
        try:
            return super().add(chunks, **options)
        finally:
            now = names.lookup(self.namespace, ids)
            changed = {
                source_of(id, document)
                for id, document, old, new in zip(ids, stood, known, now, strict=True)
                if old is not None and (new is None or new.token_ids != old.token_ids)
            }
            self._store.forget(self.namespace, [], list(changed))

    def delete(self, ids: Iterable[str], *, sources: Iterable[str] = ()) -> int:
        self._check_open()
        ids = id_list(ids)
        stood = self._store.names.documents(self.namespace, ids)
        states = {source_of(id, document) for id, document in zip(ids, stood, strict=True)}
        return super().delete(ids, sources=[*id_list(sources), *states])
