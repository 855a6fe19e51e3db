"""Retrieving, while the KV of what was found is brought into faster tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, Field, PrivateAttr

from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import BackendError, StoreError
from langchain_cacheblend.calls import chosen_engine

__all__ = ["BlendRetriever", "BlendVectorStoreRetriever"]

logger = logging.getLogger(__name__)


class BlendRetriever(BaseRetriever):
    """A wrapper around a retriever: reads the KV of its documents while a reranker, a prompt or another retriever works.

    It is read from disk or a remote tier into RAM, where the following prompt finds it. The documents are those of the
    inner retriever, unchanged, and must have ids.

    Parameters
    ----------
    retriever : BaseRetriever
        Any retriever.
    engine : BlendEngine or ServedEngine
        The engine of the model that will read the documents, as in ``llm.engine``.

    Raises
    ------
    ConfigError
        If `engine` is not a `BlendEngine`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: BaseRetriever
    engine: Engine = Field(exclude=True, repr=False)

    def __init__(self, **fields: Any) -> None:
        if "engine" in fields:
            chosen_engine(fields["engine"], None)
        super().__init__(**fields)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        self.engine.prefetch([document.id for document in documents if document.id])
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        ids = [document.id for document in documents if document.id]
        await run_in_executor(None, self.engine.prefetch, ids)
        return documents


class BlendVectorStoreRetriever(VectorStoreRetriever):
    """Retriever that ``BlendVectorStore.as_retriever`` returns; it prefetches as `BlendRetriever` does.

    Where the engine knows nothing of what is found first, which no prompt would tell, it says so in the log.
    """

    _has_looked: bool = PrivateAttr(default=False)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = super()._get_relevant_documents(query, run_manager=run_manager, **kwargs)
        self._bring(documents)
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        documents = await super()._aget_relevant_documents(query, run_manager=run_manager, **kwargs)
        await run_in_executor(None, self._bring, documents)
        return documents

    def _bring(self, documents: Iterable[Document]) -> None:
        store: Any = self.vectorstore
        ids = [document.id for document in documents if document.id]
        store.engine.prefetch(ids)
        if ids and not self._has_looked:
            try:
                known = store.engine.records(ids)
            except (BackendError, StoreError) as error:
                # An answer computes what it cannot read, and says so.
                logger.debug("it is not known whether what was found is stored: %s", error)
                return
            self._has_looked = True
            if not any(known):
                logger.warning(
                    "none of the %d documents found is known to the engine, so their texts are computed like any other: the "
                    "vector store was filled without BlendVectorStore, for another model, or before a restart of an engine that "
                    "keeps KV in RAM; call warm(store), and give the model a folder, store=... (this warning is not repeated)",
                    len(ids),
                )
