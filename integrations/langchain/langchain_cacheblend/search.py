"""The searching half of a vector store around another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from langchain_cacheblend.filters import FilterWatch

__all__ = ["SearchesInner"]

_Scored = list[tuple[Document, float]]


class SearchesInner(VectorStore):
    """Passes every search on to the inner store's method of the same name, so that its own ways of searching count.

    Parameters
    ----------
    inner : VectorStore
        The store that is searched.
    divides : frozenset of str or None
        The metadata keys that a search may filter by without a warning; None: all.
    """

    def __init__(self, inner: VectorStore, divides: frozenset[str] | None = None) -> None:
        self.inner = inner
        self._filters = FilterWatch(divides)

    @property
    def embeddings(self) -> Embeddings | None:
        """The inner store's embeddings."""
        return self.inner.embeddings

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.inner.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.inner.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self._searched(kwargs).similarity_search(query, k=k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return await self._searched(kwargs).asimilarity_search(query, k=k, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> _Scored:
        return self._searched(kwargs, *args[2:]).similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> _Scored:
        return await self._searched(kwargs, *args[2:]).asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_with_relevance_scores(self, query: str, k: int = 4, **kwargs: Any) -> _Scored:
        return self._searched(kwargs).similarity_search_with_relevance_scores(query, k=k, **kwargs)

    async def asimilarity_search_with_relevance_scores(self, query: str, k: int = 4, **kwargs: Any) -> _Scored:
        return await self._searched(kwargs).asimilarity_search_with_relevance_scores(query, k=k, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return self._searched(kwargs).similarity_search_by_vector(embedding, k=k, **kwargs)

    async def asimilarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return await self._searched(kwargs).asimilarity_search_by_vector(embedding, k=k, **kwargs)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return self._searched(kwargs).max_marginal_relevance_search(
            query, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return await self._searched(kwargs).amax_marginal_relevance_search(
            query, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return self._searched(kwargs).max_marginal_relevance_search_by_vector(
            embedding, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    async def amax_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return await self._searched(kwargs).amax_marginal_relevance_search_by_vector(
            embedding, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.inner._select_relevance_score_fn()

    def _get_retriever_tags(self) -> list[str]:
        return [type(self).__name__, *self.inner._get_retriever_tags()]

    def _searched(self, arguments: dict[str, Any], *more: Any) -> VectorStore:
        """Return the inner store, to be searched with these arguments; behind query and k stands the filter."""
        self._filters.see(arguments | ({"filter": more[0]} if more else {}))
        return self.inner
