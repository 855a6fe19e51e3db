"""The searching half of a wrapping vector store, with a warning about searches that show only some chunks of a document."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

__all__ = ["SearchesInner"]

logger = logging.getLogger(__name__)

# What stores call the argument, in their searches.
_FILTERS = ("filter", "pre_filter", "where")


def _through(name: str) -> Any:
    """Return a method that searches the inner store by its own method of that name."""

    @wraps(getattr(VectorStore, name), updated=())
    def search(self: SearchesInner, *args: Any, **kwargs: Any) -> Any:
        # After query and k stands the filter, where there is no `fetch_k`.
        place = 2 if "marginal" not in name else 4
        filters = [*args[place : place + 1], *(kwargs.get(each) for each in _FILTERS)]
        if self._divided is not None:
            self._warn_of({*_keys(filters)} - self._divided)
        return getattr(self.inner, name)(*args, **kwargs)

    return search


class SearchesInner(VectorStore):
    """Passes every search on to the inner store's method of the same name, so that its own ways of searching count.

    `divides` are the metadata keys that no document has two values of, by which a search may filter without a warning; None: all.
    """

    def __init__(self, inner: VectorStore, divides: frozenset[str] | None) -> None:
        self.inner = inner
        self._divided = None if divides is None else {*divides}

    similarity_search = _through("similarity_search")
    asimilarity_search = _through("asimilarity_search")
    similarity_search_with_score = _through("similarity_search_with_score")
    asimilarity_search_with_score = _through("asimilarity_search_with_score")
    similarity_search_with_relevance_scores = _through("similarity_search_with_relevance_scores")
    asimilarity_search_with_relevance_scores = _through("asimilarity_search_with_relevance_scores")
    similarity_search_by_vector = _through("similarity_search_by_vector")
    asimilarity_search_by_vector = _through("asimilarity_search_by_vector")
    max_marginal_relevance_search = _through("max_marginal_relevance_search")
    amax_marginal_relevance_search = _through("amax_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _through("max_marginal_relevance_search_by_vector")
    amax_marginal_relevance_search_by_vector = _through("amax_marginal_relevance_search_by_vector")

    @property
    def embeddings(self) -> Embeddings | None:
        """The inner store's embeddings."""
        return self.inner.embeddings

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.inner.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.inner.aget_by_ids(ids)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.inner._select_relevance_score_fn()

    def _get_retriever_tags(self) -> list[str]:
        return [type(self).__name__, *self.inner._get_retriever_tags()]

    def _warn_of(self, keys: set[str]) -> None:
        """Warn of filters by something that does not divide documents, once for each key."""
        for key in keys:
            (self._divided or set()).add(key)
            logger.warning(
                "a search filters by %s, which is not declared as a boundary. The KV of a chunk carries traces of other chunks "
                "of its document, so an answer can reveal something of one that the filter hides from a reader. If that is what "
                "the filter is for, make the store with boundary=[...] naming the metadata key, or its engine with "
                'companions="neutral", and add the documents again (this warning appears once for each key)',
                key,
            )


def _keys(given: Any) -> Iterator[str]:
    """Yield the metadata keys that a filter names, or a word for a filter that cannot be looked into."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            yield from _keys(value) if str(key).startswith("$") else [str(key)]
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _keys(each)
    elif given is not None:
        yield f"a {type(given).__name__}"
