"""Keeping the engine's chunks in step with a vector store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.vectorstores import VectorStore

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.engine import AddJob, AddResult
from cacheblend_rag.errors import PromptError
from langchain_cacheblend.inventory import Inventory
from langchain_cacheblend.places import DocumentPlaces
from langchain_cacheblend.siblings import Siblings

__all__ = ["ChunkKeeper"]

logger = logging.getLogger(__name__)


class ChunkKeeper:
    """Encodes what a vector store was given, and forgets what it has no longer.

    Parameters
    ----------
    inner : VectorStore
        The store.
    engine : BlendEngine
        The engine.
    places : DocumentPlaces
        Which text is a piece of which document.
    siblings : Siblings
        The other stores over the engine.
    """

    def __init__(self, inner: VectorStore, engine: BlendEngine, places: DocumentPlaces, siblings: Siblings) -> None:
        self._engine = engine
        self._places = places
        self._siblings = siblings
        self._inventory = Inventory(inner)

    def encode(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        metadatas: Sequence[Mapping[str, Any]] | None,
        progress: Callable[[int, int], None] | None,
        *,
        background: bool,
    ) -> AddResult | AddJob:
        """Encode texts under the ids that the store has for them; see `BlendVectorStore.encode`."""
        self._siblings.warn_of(ids, texts)
        # A store may hold documents without text; there is nothing to encode in them.
        blank = [id for id, text in zip(ids, texts, strict=True) if not text.strip()]
        chunks = self._chunks(ids, texts, metadatas)
        if blank:
            self._engine.delete(blank)
        try:
            try:
                return self._engine.add(chunks, progress=progress, background=background)
            except PromptError:
                return self._engine.add(self._served(chunks), progress=progress, background=background)
        except BaseException:
            # Rather no chunk under an id than the text that the store has just replaced.
            records = self._engine.records([chunk.id for chunk in chunks if chunk.id])
            self._engine.delete(
                record.id
                for chunk, record in zip(chunks, records, strict=True)
                if record is not None and record.text_hash != text_hash(chunk.text)
            )
            raise

    def present(self) -> list[str]:
        """Return which of the engine's chunks the store has."""
        return self._inventory.present(self._engine.ids())

    def forget(self, ids: Sequence[str], *, certain: bool) -> None:
        """Forget chunks that were deleted from the store, which is asked unless that is certain."""
        self.forget_all(ids if certain else set(ids).difference(self._inventory.present(ids)))

    def forgetting(self, action: Callable[[], Any]) -> Any:
        """Do something to the store, then forget the chunks that it had before and has no longer."""
        before = self.present()
        done = action()
        self.forget_all(set(before).difference(self._inventory.present(before)))
        return done

    def forget_all(self, ids: Iterable[str]) -> None:
        """Forget chunks, but not those that are documents of another store over this engine as well."""
        ids = list(dict.fromkeys(ids))
        held = self._siblings.texts(ids)
        shared = [record for record in self._engine.records(list(held)) if record is not None] if held else []
        kept = [record.id for record in shared if record.text_hash == text_hash(held[record.id])]
        self._engine.delete(set(ids).difference(kept))
        # What another store has still is no piece of this one's documents any more.
        mine = [id for id, place in zip(kept, self._engine.places(kept), strict=True) if self._places.owns(place)]
        if mine:
            self._engine.add([Chunk(held[id], id) for id in mine])

    def _chunks(
        self, ids: Sequence[str], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None
    ) -> list[Chunk]:
        given = [metadata or {} for metadata in metadatas or [{}] * len(ids)]
        rows = [row for row in zip(ids, texts, given, strict=True) if row[1].strip()]
        if not rows:
            return []
        return self._places.chunks(*zip(*rows, strict=True))

    def _served(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks that the engine takes; what the ids of the others stood for before is forgotten."""
        refusals = list(zip(chunks, self._engine.refusals(chunks), strict=True))
        for chunk, refusal in refusals:
            if refusal is not None:
                logger.warning("document %s is stored without KV: %s", chunk.id, refusal)
        self._engine.delete(chunk.id for chunk, refusal in refusals if refusal is not None and chunk.id)
        return [chunk for chunk, refusal in refusals if refusal is None]
