"""What storing the KV of documents would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core import Settings
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import run_transformations
from llama_index.core.node_parser import NodeParser
from llama_index.core.schema import BaseNode, Document

from cacheblend_rag.engine import Engine, WarmEstimate
from llama_index_cacheblend.llm import BlendLLM, find_engine
from llama_index_cacheblend.nodes import TextOf
from llama_index_cacheblend.vector_store import BlendVectorStore
from llama_index_cacheblend.warm import encoder_of, nodes_of, store_of

__all__ = ["estimate"]


def estimate(
    store: BaseIndex[Any] | BlendVectorStore,
    nodes: Sequence[BaseNode] | None = None,
    *,
    engine: Engine | BlendLLM | None = None,
    text_of: TextOf | None = None,
) -> WarmEstimate:
    """Estimate what encoding nodes would cost, in bytes and time, before any are added; nothing is stored.

    A few of them are encoded for that, which takes a few seconds.

    Parameters
    ----------
    store : BaseIndex or BlendVectorStore
        An index, with a `BlendVectorStore` or without one, or such a store.
    nodes : sequence of BaseNode, optional
        Nodes or documents that would be added; by default what is there already, as for `warm_index`. Documents are split by the
        node parsers of ``Settings.transformations``.
    engine : BlendEngine or ServedEngine or BlendLLM, optional
        Where the KV would be kept; by default as for `warm_index`.
    text_of : callable, optional
        What the language model is shown of a node; by default as for `warm_index`.

    Returns
    -------
    WarmEstimate
        What is not encoded yet: its `chunks` and `tokens`, and what they would take, `ram_bytes`, `disk_bytes` and `seconds`
        (embedding them not counted).

    Raises
    ------
    ConfigError
        If there is no engine, or the index or store cannot list its nodes.
    """
    encoder = encoder_of(store, text_of, None if engine is None else find_engine(engine))
    if nodes is None:
        found = nodes_of(store)
    else:
        documents = [node for node in nodes if isinstance(node, Document)]
        parsers = [each for each in Settings.transformations if isinstance(each, NodeParser)]
        split = run_transformations(documents, parsers) if documents else []
        found = [*(node for node in nodes if not isinstance(node, Document)), *split]
    wrapper = store_of(store)
    return encoder.estimate(wrapper.with_parents(found) if isinstance(wrapper, BlendVectorStore) else found)
