"""Retrieving, while the KV of what was found is brought into faster tiers."""

from __future__ import annotations

import logging
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import PrivateAttr

__all__ = ["BlendVectorStoreRetriever"]

logger = logging.getLogger(__name__)


class BlendVectorStoreRetriever(VectorStoreRetriever):
    """Retriever of a `BlendVectorStore`: reads the KV of what it finds from disk or a remote tier into RAM.

    If the engine knows nothing of what is found, which no prompt would tell, it says so in the log.
    """

    _has_warned: bool = PrivateAttr(default=False)

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

    def _bring(self, documents: list[Document]) -> None:
        ids = [document.id for document in documents if document.id]
        found = self.vectorstore.engine.prefetch(ids)  # type: ignore[attr-defined]  # of a BlendVectorStore
        if ids and not self._has_warned and not getattr(found, "chunks", True):
            self._has_warned = True
            logger.warning(
                "none of the %d documents found is known to the engine, so their texts are computed like any other: the vector "
                "store was filled without BlendVectorStore, for another model, or before a restart of an engine that keeps KV in "
                "RAM; call warm(store), and give the model a folder, store=... (this warning is not repeated)",
                len(ids),
            )
