"""The engine of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel

from cacheblend_hybrid.backend import StateBackend, states_of
from cacheblend_rag.chunk import Chunk, chunk_list, id_list
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.model import state_layers

__all__ = ["HybridEngine"]


class HybridEngine(BlendEngine):
    """Answers prompts with a model some of whose layers keep a state instead of KV for each token, which cannot be moved.

    Such a model cannot be blended: what it has read of a chunk serves where the same text stands before it, and nowhere else.
    Served is a prompt that begins with a head and right behind it has a document that was added, whole or its first chunks: the
    state at the end of these is stored, the next time the model goes on from there, and what it computes is what it would compute
    by itself. Every other prompt is read in full, and its report says what it lacks. Unless the head is fixed (`FixedText`), the
    state stays in RAM.

    `BlendEngine.from_pretrained` makes it of such a model where this distribution is installed. The parameters and methods are
    those of `BlendEngine`; `heads` lists the states as well. Prompts are answered one after the other.

    Raises
    ------
    UnsupportedModelError
        If ``config.strict`` is set, since the model cannot be blended.
    """

    _kind = StateBackend

    @classmethod
    def claims(cls, model: Any) -> bool:
        """Whether that is a model with recurrent layers."""
        return isinstance(model, PreTrainedModel) and bool(state_layers(model))

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
