"""A retriever that has the KV of what it retrieves fetched at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.llm import BlendLLM

__all__ = ["BlendRetriever"]


class BlendRetriever(BaseRetriever):
    """Retrieves with another retriever, and has the engine fetch the nodes' KV from disk and remote tiers meanwhile.

    Reading begins as soon as the nodes are known and goes on while postprocessors, a reranker for example, work on them. What
    they drop is read for nothing, so set `limit` if many candidates are retrieved.

    Parameters
    ----------
    retriever : BaseRetriever
        The retriever.
    llm : BlendLLM, optional
        The model whose engine has the KV.
    engine : BlendEngine or ServedEngine, optional
        That engine, instead of `llm`.
    limit : int, optional
        How many nodes, from the first one on, are fetched; all by default.
    callback_manager : CallbackManager, optional
        Callbacks; by default those of the retriever.

    Raises
    ------
    ConfigError
        If not exactly one of `llm` and `engine` is given, or `limit` is below 1.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: BlendLLM | None = None,
        *,
        engine: Engine | None = None,
        limit: int | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if (llm is None) == (engine is None):
            raise ConfigError("give BlendRetriever either llm, a BlendLLM, or its engine")
        if llm is not None and not isinstance(llm, BlendLLM):
            raise ConfigError(f"llm is a {type(llm).__name__}, which has no stored KV to fetch; give a BlendLLM")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit} fetches nothing; give a number from 1 upwards, or leave it out")
        super().__init__(callback_manager=callback_manager or getattr(retriever, "callback_manager", None))
        self._retriever = retriever
        self._engine: Engine = llm.engine if engine is None and llm is not None else engine  # type: ignore[assignment]
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
