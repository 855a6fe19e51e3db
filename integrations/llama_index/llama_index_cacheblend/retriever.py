"""A retriever that has the KV of what it retrieves fetched at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.llm import BlendLLM, find_engine

__all__ = ["BlendRetriever"]


class BlendRetriever(BaseRetriever):
    """Retrieves with another retriever, and has the engine fetch the nodes' KV from disk and remote tiers meanwhile.

    Reading begins as soon as the nodes are known and goes on while postprocessors, a reranker for example, work on them. What
    they drop is read for nothing, so set `limit` if many candidates are retrieved. Attributes that it lacks are the retriever's.

    Parameters
    ----------
    retriever : BaseRetriever
        The retriever.
    llm : BlendLLM or BlendEngine or ServedEngine, optional
        The model whose engine has the KV, or that engine; by default ``Settings.llm``.
    limit : int, optional
        How many nodes, from the first one on, are fetched; all by default.

    Raises
    ------
    ConfigError
        If there is no engine, or `limit` is below 1.
    """

    def __init__(
        self, retriever: BaseRetriever, llm: BlendLLM | Engine | None = None, *, limit: int | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} fetches nothing; give a number from 1 upwards, or leave it out")
        super().__init__(callback_manager=getattr(retriever, "callback_manager", None))
        self._retriever = retriever
        self._engine = find_engine(llm)
        self._limit = limit

    @property
    def retriever(self) -> BaseRetriever:
        """The retriever that finds the nodes."""
        return self._retriever

    def __getattr__(self, name: str) -> Any:
        """Everything else is the retriever's own, `similarity_top_k` for example."""
        if name.startswith("__") or name == "_retriever":
            raise AttributeError(name)
        return getattr(self._retriever, name)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        self._fetch(nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        # Ids are looked up in a file.
        await asyncio.to_thread(self._fetch, nodes)
        return nodes

    def _fetch(self, nodes: Sequence[NodeWithScore]) -> None:
        self._engine.prefetch([each.node_id for each in nodes[: self._limit]])
