"""The vector store that keeps the chunks' KV in step with their embeddings."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore

from cacheblend_rag import Chunk
from cacheblend_rag.chat.engines import encoding_bar, given_engine
from cacheblend_rag.engine import AddJob, AddResult, ChunkCollection, Engine
from cacheblend_rag.errors import ConfigError, PromptError
from langchain_cacheblend.inventory import Inventory
from langchain_cacheblend.places import Places
from langchain_cacheblend.retriever import BlendVectorStoreRetriever
from langchain_cacheblend.search import SearchesInner

__all__ = ["BlendVectorStore"]

logger = logging.getLogger(__name__)

_OPTIONS = ("background", "boundary", "name", "show_progress")


class BlendVectorStore(SearchesInner):
    """A wrapper around a vector store: encodes added documents, and deletes the KV of deleted ones.

    A chunk's id is the id of its document, and its text the document's ``page_content``. So documents of several stores over one
    engine need different ids: the chunk of an id is the one added last, and deleting it from any of them deletes its KV.
    The inner store does everything else; what has no counterpart here is on ``store.inner``.

    Parameters
    ----------
    inner : VectorStore
        Your store: Chroma, FAISS or any other.
    engine : BlendEngine or ServedEngine, or a model that has one
        The engine of the model that will read the documents, as in ``llm.engine``.
    server : str, optional
        The address of a server whose engine it is, instead of `engine`.
    background : bool
        Whether adding returns before the texts are encoded, which continues in the background; `flush` waits for it.
    boundary : sequence of str
        Metadata keys whose change divides a document: no chunk is read behind one with another value.
    name : str, optional
        Tells this store's documents from those of other stores over the engine. By default the kind of the store and its
        collection.
    show_progress : bool
        Whether a bar shows how many texts are encoded, where that takes longer than two seconds.

    Raises
    ------
    ConfigError
        If `inner` is a `BlendVectorStore` already, `engine` is not an engine, or `boundary` is invalid, as it is where the engine
        reads chunks behind any others (`companions` "similar").
    """

    def __init__(
        self,
        inner: VectorStore,
        *,
        engine: Engine | None = None,
        server: str | None = None,
        background: bool = False,
        boundary: Sequence[str] = (),
        name: str | None = None,
        show_progress: bool = False,
    ) -> None:
        if isinstance(inner, BlendVectorStore):
            raise ConfigError(
                "inner is a BlendVectorStore already; use it as it is, or wrap what is in it: BlendVectorStore(store.inner, ...)"
            )
        self.engine = engine = given_engine(engine, server)
        self.background, self._show_progress = background, show_progress
        self._inventory = Inventory(inner)
        self._places = Places(inner, engine, name, boundary)
        self._collection = ChunkCollection(engine, self._inventory.present)
        super().__init__(inner, self._places.divides)

    # Adding

    def add_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add texts to the inner store, then encode them.

        A text that the model cannot take, because it is longer than the window or contains half a character, is stored without
        KV, and a warning names it.

        Returns
        -------
        list of str
            The ids that the inner store gave them.

        Raises
        ------
        StoreError
            If the KV cannot be stored. The inner store has the texts by then, so do not add them again: `warm` encodes what is
            left.
        """
        texts = list(texts)
        given = self.inner.add_texts(texts, metadatas, **kwargs)
        self.encode(given, texts, metadatas)
        return given

    async def aadd_texts(
        self, texts: Iterable[str], metadatas: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> list[str]:
        """Add texts to the inner store, then encode them in another thread."""
        texts = list(texts)
        given = await self.inner.aadd_texts(texts, metadatas, **kwargs)
        await run_in_executor(None, self.encode, given, texts, metadatas)
        return given

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        inner: type[VectorStore] | None = None,
        engine: Engine | None = None,
        **kwargs: Any,
    ) -> BlendVectorStore:
        """Make a store of the class `inner` by its own ``from_texts``, wrap it, and encode the texts.

        One line becomes another: ``Chroma.from_documents(documents, embeddings)`` becomes
        ``BlendVectorStore.from_documents(documents, embeddings, inner=Chroma, engine=llm.engine)``.

        Parameters
        ----------
        texts, embedding, metadatas, ids
            As for every vector store.
        inner : type
            The class; a store that is there already is wrapped by ``BlendVectorStore(store, engine=...)``.
        engine : BlendEngine or ServedEngine
            The engine.
        **kwargs : Any
            What `BlendVectorStore` takes, as `background`; the others are passed to the class's ``from_texts``.

        Raises
        ------
        ConfigError
            If `inner` is not a class, or there is no engine.
        """
        if not isinstance(inner, type):
            raise ConfigError(
                f"inner={inner!r:.60} is not the class of a vector store, as Chroma; wrap a store that is there already: "
                "BlendVectorStore(store, engine=...)"
            )
        engine = given_engine(engine, kwargs.pop("server", None))
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = [id or str(uuid.uuid4()) for id in ids or [""] * len(texts)]
        made = inner.from_texts(texts, embedding, metadatas, ids=given, **kwargs)  # type: ignore[arg-type]
        store = cls(made, engine=engine, **options)
        store.encode(given, texts, metadatas)
        return store

    def encode(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        metadatas: Sequence[dict[str, Any]] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> AddResult | AddJob:
        """Encode texts under the ids that the inner store has for them; adding does it by itself.

        Parameters
        ----------
        ids, texts : sequence of str
            As many of one as of the other. A blank text has no KV, and neither has one that the model cannot take.
        metadatas : sequence of dict, optional
            One for each text, as far as there are any; they say which document it is a piece of, and where in it.
        progress : callable, optional
            Called with the number of finished texts and of all, after each batch.

        Returns
        -------
        AddResult or AddJob
            What was done; in the background, a job that reports it.
        """
        if len(ids) != len(texts):
            name = type(self.inner).__name__
            raise ConfigError(f"{name} gave {len(ids)} ids for {len(texts)} texts, so the chunks would have no ids")
        # Some stores number what they have.
        ids = list(map(str, ids))
        chunks = self._chunks(ids, texts, metadatas)
        # What was deleted behind our back, or left by a killed process, is no context of these texts.
        sources = {self._places.of_source(each or {}) for each in metadatas or ()} - {None}
        spared = set(ids)
        known = (id for each in sources for id in self.engine.ids(within=each) if id not in spared)
        gone = self._collection.absent(known)
        if blank := set(ids).difference(chunk.id for chunk in chunks):
            self.engine.delete(blank)
        shown = self._show_progress and progress is None and not self.background
        with encoding_bar(len(ids), "text") if shown else nullcontext(progress) as tell:
            return self.engine.add(chunks, progress=tell, on_refused=_warn_of, background=self.background, gone=gone)

    def _chunks(
        self, ids: Sequence[str], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]] | None
    ) -> list[Chunk]:
        """Return a chunk for each text that is not blank; of several with one id for the last."""
        # There may be fewer metadata, and None among them.
        rows = zip(ids, texts, chain(metadatas or (), repeat(None)), strict=False)
        chunks = {id: self._places.chunk(id, text, metadata or {}) for id, text, metadata in rows if text.strip()}
        return list(chunks.values())

    def flush(self) -> None:
        """Wait until the texts that were added in the background are encoded; `StoreError` if KV could not be stored."""
        self.engine.flush()

    def sync(self) -> int:
        """Forget the KV of documents that were deleted behind this store's back; return how many chunks that were.

        What the engine knows and no vector store of this process has is forgotten, but for parts of schemas. If chunks were added
        to the engine in another way, or other processes have vector stores over the same KV, call the engine's `sync` with all
        ids that are to stay instead.
        """
        return self._collection.sync(self.engine.ids())

    # Retrieving

    def as_retriever(self, **kwargs: Any) -> BlendVectorStoreRetriever:
        """Return a retriever that has the KV of what it finds read while the prompt is made; it takes the usual arguments."""
        tags = kwargs.pop("tags", None) or self._get_retriever_tags()
        return BlendVectorStoreRetriever(vectorstore=self, tags=[*tags], **kwargs)

    # Deleting

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete from the inner store, and forget the KV of what it no longer has.

        Without ids the inner store decides (it may delete all, or those that `kwargs` select), and is asked before and afterwards
        for what it has.
        """
        if ids is None:
            return self._forgetting(lambda: self.inner.delete(None, **kwargs))
        done = self.inner.delete(ids, **kwargs)
        self._forget_deleted(ids, done, kwargs)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete from the inner store, and forget the KV of what it no longer has."""
        if ids is None:
            return await run_in_executor(None, lambda: self.delete(None, **kwargs))
        done = await self.inner.adelete(ids, **kwargs)
        await run_in_executor(None, self._forget_deleted, ids, done, kwargs)
        return done

    def reset_collection(self) -> None:
        """Empty the inner store, if it has this method, and forget the KV of what it had."""
        self._forgetting(self.inner.reset_collection)  # type: ignore[attr-defined]

    def delete_collection(self) -> None:
        """Remove the inner store's collection, if it has this method, and forget the KV of what it had."""
        present = self._inventory.present(self.engine.ids())
        self.inner.delete_collection()  # type: ignore[attr-defined]
        self._forget(present)

    def _forget_deleted(self, ids: Sequence[str], done: bool | None, kwargs: Mapping[str, Any]) -> None:
        """Forget chunks that were to be deleted from the store, which is asked unless it is certain that they were."""
        certain = done is not False and not kwargs
        self._forget(ids if certain else set(ids).difference(self._inventory.present(ids)))

    def _forgetting(self, action: Callable[[], bool | None]) -> bool | None:
        """Do something to the store, then forget the chunks that it had before and no longer has."""
        before = self._inventory.present(self.engine.ids())
        done = action()
        self._forget(set(before).difference(self._inventory.present(before)))
        return done

    def _forget(self, ids: Iterable[str]) -> None:
        self.engine.delete(list(map(str, ids)))


def _warn_of(chunk: Chunk, refusal: PromptError) -> None:
    logger.warning("document %s is stored without KV: %s", chunk.id, refusal)
