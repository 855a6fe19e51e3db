"""Computing the KV of an index that already exists, and estimating what computing KV would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag.engine import AddJob, AddResult, Engine, WarmEstimate
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.llm import BlendLLM, find_engine
from llama_index_cacheblend.nodes import Boundary, NodeEncoder, TextOf
from llama_index_cacheblend.vector_store import BlendVectorStore, listed_ids, listed_nodes

__all__ = ["estimate", "warm_index"]


def warm_index(
    index: BaseIndex[Any],
    *,
    engine: Engine | BlendLLM | None = None,
    text_of: TextOf | None = None,
    nodes: Sequence[BaseNode] | None = None,
    show_progress: bool = False,
    background: bool = False,
) -> AddResult | AddJob:
    """Compute the KV of the nodes of an index that was made before, or without, `BlendVectorStore`.

    The index stays as it is: nothing is embedded, and only KV is written. What is already stored is not computed again, so an
    interrupted call is finished by the next one, and a call for an index that is already warm costs little. Nodes whose text was
    changed without the store are encoded again. Documents are divided as the index's `BlendVectorStore` says, if it has one.

    Parameters
    ----------
    index : BaseIndex
        The index.
    engine : BlendEngine or ServedEngine or BlendLLM, optional
        Where the KV is computed and kept; by default that of the index's `BlendVectorStore`, or else of ``Settings.llm``.
    text_of : BaseNodePostprocessor or callable, optional
        The postprocessor that changes what the language model is shown of a node, or a function that returns it; by default what
        the index's `BlendVectorStore` was given, or else the node's text and metadata as LlamaIndex writes them.
    nodes : sequence of BaseNode, optional
        The nodes to encode, instead of all of the index: those of a docstore, for example, that a retriever merges others into.
    show_progress : bool
        Whether to show a progress bar.
    background : bool
        Whether to return when the nodes are read and named, and to encode them when no prompt waits for the model.

    Returns
    -------
    AddResult or AddJob
        What was done; in the background, the engine's job, with ``progress``, ``done()`` and ``result(timeout_s)``. A warning
        names each node without KV, which is computed when it is retrieved.

    Raises
    ------
    ConfigError
        If there is no engine, or the index cannot list its nodes.
    StoreError
        If the KV cannot be stored; what was stored until then stays.
    """
    encoder = _encoder_of(index, text_of, engine)
    store = _store_of(index)
    found = _nodes_of(index) if nodes is None else list(nodes)
    gone = store.left_of(found) if isinstance(store, BlendVectorStore) and store.engine is encoder.engine else []
    return encoder.encode(found, show_progress=show_progress, background=background, gone=gone)


def estimate(
    index: BaseIndex[Any] | BlendVectorStore,
    nodes: Sequence[BaseNode] | None = None,
    *,
    engine: Engine | BlendLLM | None = None,
    text_of: TextOf | None = None,
) -> WarmEstimate:
    """Estimate what encoding nodes would cost, in bytes and time, before any are added; nothing is stored.

    A few of them are encoded for that, which takes a few seconds.

    Parameters
    ----------
    index : BaseIndex or BlendVectorStore
        An index, with a `BlendVectorStore` or without one, or such a store.
    nodes : sequence of BaseNode, optional
        Nodes that would be added; by default what is there already, as for `warm_index`.
    engine, text_of : optional
        As for `warm_index`.

    Returns
    -------
    WarmEstimate
        What is not encoded yet: its `chunks` and `tokens`, and what they would take, `ram_bytes`, `disk_bytes` and `seconds`
        (embedding them not counted).
    """
    found = _nodes_of(index) if nodes is None else nodes
    return _encoder_of(index, text_of, engine).estimate(found)


def _store_of(source: BaseIndex[Any] | BlendVectorStore) -> BasePydanticVectorStore | None:
    """Return the vector store that an index has, or that is given; None of an index without one; ConfigError for other things."""
    if not isinstance(source, BaseIndex | BlendVectorStore):
        raise ConfigError(
            f"a {type(source).__name__} was given for the index; give an index or a BlendVectorStore, and nodes as nodes=..."
        )
    return source if isinstance(source, BlendVectorStore) else getattr(source, "vector_store", None)


def _encoder_of(source: BaseIndex[Any] | BlendVectorStore, text_of: TextOf | None, engine: Any) -> NodeEncoder:
    """Return what encodes the nodes of an index or a store."""
    store = _store_of(source)
    if not isinstance(store, BlendVectorStore):
        return NodeEncoder(find_engine(engine), text_of, Boundary())
    own = store.encoder
    return NodeEncoder(own.engine if engine is None else find_engine(engine), text_of or own.text_of, own.boundary)


def _nodes_of(source: BaseIndex[Any] | BlendVectorStore) -> list[BaseNode]:
    """Return the nodes of an index as a retriever would: those of a vector store that keeps nodes, or else of the docstore."""
    store = _store_of(source)
    inner = store.inner if isinstance(store, BlendVectorStore) else store
    if inner is not None and inner.stores_text:
        try:
            return listed_nodes(inner)
        except NotImplementedError:
            pass
    if isinstance(source, BlendVectorStore):
        raise ConfigError(f"{type(inner).__name__} cannot list its nodes; give the index, or the nodes")
    struct: Any = source.index_struct
    node_ids: Any = getattr(struct, "nodes_dict", None) or getattr(struct, "nodes", None)
    node_ids = node_ids or getattr(struct, "node_ids", ())
    if isinstance(node_ids, dict):
        # A node that was deleted may be left in the docstore; it cannot be retrieved then.
        held = set(listed_ids(inner) or ()) if isinstance(inner, SimpleVectorStore) else node_ids
        node_ids = [node_id for text_id, node_id in node_ids.items() if text_id in held]
    if not node_ids and inner is not None and inner.stores_text:
        raise ConfigError(
            f"{type(inner).__name__} cannot list its nodes; pass them, as in warm_index(index, nodes=[...])"
        )
    return source.docstore.get_nodes(list(node_ids), raise_error=False)
