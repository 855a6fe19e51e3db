"""The vector store that keeps the chunks' KV in step with their embeddings."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from cacheblend_rag import Chunk
from cacheblend_rag.chunk import document_name, text_hash
from cacheblend_rag.engine import AddJob, AddResult, Engine
from cacheblend_rag.errors import ConfigError, PromptError
from langchain_cacheblend.calls import chosen_engine
from langchain_cacheblend.inventory import Inventory, Siblings
from langchain_cacheblend.places import DOCUMENT_KEYS, DocumentPlaces
from langchain_cacheblend.retriever import BlendVectorStoreRetriever
from langchain_cacheblend.search import SearchesInner

__all__ = ["BlendVectorStore"]

logger = logging.getLogger(__name__)

_OPTIONS = ("background", "show_progress", "context", "boundary", "document_keys", "name")


class BlendVectorStore(SearchesInner):
    """A wrapper around a vector store: encodes added documents, and deletes the KV of deleted ones.

    A chunk's id is the id of its document, and its text the document's ``page_content``. So documents of several stores over one
    engine need different ids; if two share an id, the chunk is the one added last, and a warning says so.
    The inner store does everything else; what has no counterpart here is on ``store.inner``.

    Parameters
    ----------
    inner : VectorStore
        Your store: Chroma, FAISS or any other.
    engine : BlendEngine or ServedEngine
        The engine of the model that will read the documents, as in ``llm.engine``.
    server : str, optional
        The address of a server whose engine it is, instead of `engine`.
    background : bool
        Whether adding returns before the texts are encoded, which continues in the background; `flush` waits for it.
    show_progress : bool
        Whether to show a progress bar while texts are encoded, unless in the background. The log has a line every five seconds
        at level INFO in any case.
    boundary : sequence of str
        Metadata keys whose change divides a document: no chunk is read behind one with another value.
    document_keys : sequence of str
        Metadata keys that say which document a text is a piece of. Texts without the first key are of no document; the others
        count if present.
    name : str, optional
        Distinguishes this store's documents from those of other stores over the engine, in other processes too. By default its
        collection, in stores that have one; others need a name so that their documents can be continued after a restart.

    Attributes
    ----------
    places : DocumentPlaces
        Knows which text is a piece of which document.

    Raises
    ------
    ConfigError
        If `inner` is a `BlendVectorStore` already, `engine` is not a `BlendEngine`, or `boundary` or
        `document_keys` are invalid, as `boundary` is where the engine reads chunks behind any others (`companions` "similar").
    """

    def __init__(
        self,
        inner: VectorStore,
        *,
        engine: Engine | None = None,
        server: str | None = None,
        background: bool = False,
        show_progress: bool = False,
        boundary: Sequence[str] = (),
        document_keys: Sequence[str] = DOCUMENT_KEYS,
        name: str | None = None,
    ) -> None:
        if isinstance(inner, BlendVectorStore):
            raise ConfigError(
                "inner is a BlendVectorStore already; use it as it is, or wrap what is in it: BlendVectorStore(store.inner, ...)"
            )
        self.engine = engine = chosen_engine(engine, server)
        self.background = background
        self.show_progress = show_progress
        self._inventory = Inventory(inner)
        self._siblings = Siblings(inner, engine, name)
        self.places = DocumentPlaces(engine, self._siblings.name, document_keys, boundary)
        self._collection = engine.collection(self._inventory.present)
        super().__init__(inner, self.places.divides)

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is not here.
        inner = self.__dict__.get("inner")
        if name.startswith("_") or not hasattr(inner, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(
            f"a BlendVectorStore has no {name}, but the {type(inner).__name__} in it has: store.inner.{name}",
            name=name,
            obj=self,
        )

    # Adding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
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
        # Not every store takes ids=None as if it were left out.
        named = kwargs if ids is None else kwargs | {"ids": ids}
        given = self.inner.add_texts(texts, metadatas, **named)
        self.encode(given, texts, metadatas)
        return given

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts to the inner store, then encode them in another thread."""
        texts = list(texts)
        named = kwargs if ids is None else kwargs | {"ids": ids}
        given = await self.inner.aadd_texts(texts, metadatas, **named)
        await run_in_executor(None, self.encode, given, texts, metadatas)
        return given

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents to the inner store, then encode them; see `add_texts`."""
        given = self.inner.add_documents(documents, **kwargs)
        self.encode(given, *_of(documents))
        return given

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents to the inner store, then encode them in another thread."""
        given = await self.inner.aadd_documents(documents, **kwargs)
        await run_in_executor(None, self.encode, given, *_of(documents))
        return given

    def update_document(self, document_id: str, document: Document) -> None:
        """Replace a document, in stores that have this method."""
        self.update_documents([document_id], [document])

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """Replace documents, in stores that have this method."""
        self._inner_method("update_documents")(ids, documents)
        self.encode(ids, *_of(documents))

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        inner: VectorStore | type[VectorStore] | None = None,
        engine: Engine | None = None,
        **kwargs: Any,
    ) -> BlendVectorStore:
        """Wrap `inner` and add texts to it; `from_documents` does the same with documents.

        With a class as `inner`, one line becomes another: ``Chroma.from_documents(documents, embeddings)`` becomes
        ``BlendVectorStore.from_documents(documents, embeddings, inner=Chroma, engine=llm.engine)``.

        Parameters
        ----------
        texts : list of str
            The texts.
        embedding : Embeddings, optional
            Embeds the texts; a store that is there already has its own.
        metadatas : list of dict, optional
            One for each text.
        ids : list of str, optional
            One for each text.
        inner : VectorStore or type
            The store to wrap, or the class of one to make by its own ``from_texts``.
        engine : BlendEngine or ServedEngine
            The engine.
        **kwargs : Any
            What the class takes, as `background`; the others are passed to the inner store's ``add_texts``, or the class's
            ``from_texts``.

        Raises
        ------
        ConfigError
            If `inner` or `engine` is missing, or `embedding` is not the inner store's.
        """
        if inner is None or (engine is None and kwargs.get("server") is None):
            raise ConfigError("give inner=, the vector store to wrap, and engine=, the engine that encodes its texts")
        engine = chosen_engine(engine, kwargs.pop("server", None))
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        if isinstance(inner, type):
            given = [str(uuid.uuid4()) for _ in texts]
            if ids is not None:
                given = [id or new for id, new in zip(ids, given, strict=True)]
            made = inner.from_texts(texts, embedding, metadatas, ids=given, **kwargs)  # type: ignore[arg-type]
            store = cls(made, engine=engine, **options)
            store.encode(given, texts, metadatas)
            return store
        if embedding is not None and inner.embeddings is not None and embedding is not inner.embeddings:
            raise ConfigError("embedding is not the one that the inner store embeds with; leave it out")
        store = cls(inner, engine=engine, **options)
        store.add_texts(texts, metadatas, ids=ids, **kwargs)
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

        Raises
        ------
        ConfigError
            If there are more of one than of the other.
        """
        if len(ids) != len(texts):
            name = type(self.inner).__name__
            raise ConfigError(f"{name} gave {len(ids)} ids for {len(texts)} texts, so the chunks would have no ids")
        # Some stores number what they have.
        ids = list(map(str, ids))
        given = [metadata or {} for _, metadata in zip(ids, chain(metadatas or (), repeat(None)), strict=False)]
        self._siblings.warn_of(ids, texts)
        # What was deleted behind our back, or given other ids since a process was killed, is no context of these texts.
        sources = {document_name(metadata.get(DOCUMENT_KEYS[0])) for metadata in given}
        self._collection.sync({source for source in sources if source is not None}, ids)
        rows = [row for row in zip(ids, texts, given, strict=True) if row[1].strip()]
        chunks = self.places.chunks(*zip(*rows, strict=True)) if rows else []
        if len(rows) < len(ids):
            # A store may hold documents without text; there is nothing to encode in them.
            self.engine.delete([id for id, text in zip(ids, texts, strict=True) if not text.strip()])
        try:
            if progress is None and self.show_progress and not self.background:
                with tqdm(desc="Encoding texts", unit="text") as bar:
                    return self.engine.add(chunks, progress=partial(_advance, bar), on_refused=_warn_of)
            return self.engine.add(chunks, progress=progress, on_refused=_warn_of, background=self.background)
        except BaseException:
            # Rather no chunk under an id than the text that the store has just replaced.
            records = self.engine.records([chunk.id for chunk in chunks if chunk.id])
            self.engine.delete(
                record.id
                for chunk, record in zip(chunks, records, strict=True)
                if record is not None and record.text_hash != text_hash(chunk.text)
            )
            raise

    def flush(self) -> None:
        """Wait until the texts that were added in the background are encoded.

        Raises
        ------
        StoreError
            If the KV of some of them could not be stored; it is computed at query time.
        """
        self.engine.flush()

    def sync(self) -> int:
        """Forget the KV of documents that were deleted behind this store's back.

        Where other processes have vector stores over the same KV, call the engine's `sync` with the ids of all of them instead.

        Returns
        -------
        int
            How many chunks were forgotten.
        """
        return self._collection.sync()

    # Retrieving

    def as_retriever(self, **kwargs: Any) -> BlendVectorStoreRetriever:
        """Return a retriever that has the KV of what it finds read while the prompt is made; it takes the usual arguments."""
        tags = kwargs.pop("tags", None) or self._get_retriever_tags()
        return BlendVectorStoreRetriever(vectorstore=self, tags=[*tags], **kwargs)

    # Deleting

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete from the inner store, and forget the KV of what it no longer has.

        Parameters
        ----------
        ids : list of str, optional
            Which documents. Without ids the inner store decides (it may delete all, or those that `kwargs` select), and is
            asked before and afterwards for what it has.
        **kwargs : Any
            Passed to the inner store.
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
        """Empty the inner store, in stores that have this method, and forget the KV of what it had."""
        self._forgetting(self._inner_method("reset_collection"))

    def delete_collection(self) -> None:
        """Remove the inner store's collection, in stores that have this method, and forget the KV of what it had."""
        present = self._inventory.present(self.engine.ids())
        self._inner_method("delete_collection")()
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
        """Forget chunks, but not those that are documents of another store over this engine as well."""
        ids = list(dict.fromkeys(map(str, ids)))
        held = self._siblings.texts(ids)
        shared = [record for record in self.engine.records(list(held)) if record is not None] if held else []
        kept = [record.id for record in shared if record.text_hash == text_hash(held[record.id])]
        self._collection.forget([id for id in ids if id not in kept])
        # What another store still has is no longer a piece of this one's documents.
        mine = [id for id, place in zip(kept, self.engine.places(kept), strict=True) if self.places.owns(place)]
        if mine:
            self.engine.add([Chunk(held[id], id) for id in mine])

    def _inner_method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] | None = getattr(self.inner, name, None)
        if method is None:
            raise ConfigError(
                f"{type(self.inner).__name__} has no {name}; use add_documents with the same ids, or delete"
            )
        return method


def _of(documents: Sequence[Document]) -> tuple[list[str], list[dict[str, Any]]]:
    return [document.page_content for document in documents], [document.metadata for document in documents]


def _advance(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _warn_of(chunk: Chunk, refusal: PromptError) -> None:
    logger.warning("document %s is stored without KV: %s", chunk.id, refusal)
