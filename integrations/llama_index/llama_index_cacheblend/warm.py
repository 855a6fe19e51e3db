"""Computing the KV of an index that already exists, and estimating what computing KV would cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from llama_index.core import Settings
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import run_transformations
from llama_index.core.node_parser import NodeParser
from llama_index.core.schema import BaseNode, Document
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from cacheblend_rag.chunk import is_part
from cacheblend_rag.engine import AddJob, AddResult, Engine, WarmEstimate
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.inventory import Inventory
from llama_index_cacheblend.llm import BlendLLM, find_engine
from llama_index_cacheblend.nodes import Boundary, EncodedNodes, NodeEncoder, Progress, TextOf
from llama_index_cacheblend.vector_store import BlendVectorStore

__all__ = ["WarmJob", "WarmResult", "estimate", "warm_index"]

# Nodes that are handed over at once: all of them are tokenised before the first is encoded.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class WarmResult:
    """Result of `warm_index`.

    `named`, `unchanged`, `without_text` and `failed` are the nodes, each counted once.

    Attributes
    ----------
    nodes : int
        Nodes of the index.
    encoded : int
        Texts whose KV was computed now.
    named : int
        Nodes that are new to the engine or have a new text; more than were encoded if texts recur or their KV was there
        already, for example under another id.
    unchanged : int
        Nodes that were already stored in exactly this form.
    tokens : int
        Tokens encoded now.
    without_text : tuple of str
        Ids of nodes of which the language model sees nothing.
    failed : dict of str to str
        Ids of the other nodes that have no KV now, and why. They are computed when they are retrieved.
    pruned : int
        Chunks that the engine knew and the index does not, whose KV was dropped.
    seconds : float
        How long it took.
    """

    nodes: int
    encoded: int
    unchanged: int
    tokens: int
    named: int = 0
    without_text: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    pruned: int = 0
    seconds: float = 0.0


class WarmJob:
    """Job that `warm_index` returns when it encodes in the background.

    Parameters
    ----------
    parts : sequence of EncodedNodes
        What was handed to the engine.
    sum_up : callable
        Makes the result of what the engine did.
    """

    def __init__(self, parts: Sequence[EncodedNodes], sum_up: Callable[[Sequence[AddResult]], WarmResult]) -> None:
        self._jobs = [part.done for part in parts if isinstance(part.done, AddJob)]
        self._sum_up = sum_up

    @property
    def progress(self) -> tuple[int, int]:
        """Number of nodes with text that are finished, and of all of them."""
        counts = [job.progress for job in self._jobs]
        return sum(finished for finished, _ in counts), sum(total for _, total in counts)

    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return all(job.done() for job in self._jobs)

    def result(self, timeout_s: float | None = None) -> WarmResult:
        """Wait for the end of the work.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds to wait at most; by default as long as it takes.

        Returns
        -------
        WarmResult
            What was done.

        Raises
        ------
        CacheBlendError
            What went wrong, a `StoreError` most likely; what was stored until then stays.
        TimeoutError
            If the work goes on after `timeout_s` seconds.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        results = [job.result(None if until is None else max(0.0, until - time.monotonic())) for job in self._jobs]
        return self._sum_up(results)


@overload
def warm_index(
    index: BaseIndex[Any],
    *,
    engine: Engine | BlendLLM | None = ...,
    text_of: TextOf | None = ...,
    nodes: Sequence[BaseNode] | None = ...,
    progress: Progress | None = ...,
    show_progress: bool = ...,
    prune: bool = ...,
    background: Literal[False] = ...,
) -> WarmResult: ...


@overload
def warm_index(
    index: BaseIndex[Any],
    *,
    engine: Engine | BlendLLM | None = ...,
    text_of: TextOf | None = ...,
    nodes: Sequence[BaseNode] | None = ...,
    progress: Progress | None = ...,
    show_progress: bool = ...,
    prune: bool = ...,
    background: Literal[True],
) -> WarmJob: ...


def warm_index(
    index: BaseIndex[Any],
    *,
    engine: Engine | BlendLLM | None = None,
    text_of: TextOf | None = None,
    nodes: Sequence[BaseNode] | None = None,
    progress: Progress | None = None,
    show_progress: bool = False,
    prune: bool = False,
    background: bool = False,
) -> WarmResult | WarmJob:
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
        The nodes to encode, instead of all of the index and the parents that its `BlendVectorStore` knows of.
    progress : callable, optional
        Called with the number of finished nodes and of all, batch after batch.
    show_progress : bool
        Whether to show a progress bar.
    prune : bool
        Whether KV of chunks that are not in the index is dropped, as of nodes that were deleted behind the store's back. Only for
        an engine that keeps nothing but this index.
    background : bool
        Whether to return when the nodes are read and named, and to encode them when no prompt waits for the model. The job then
        reports progress.

    Returns
    -------
    WarmResult or WarmJob
        What was done; in the background, a job that reports it.

    Raises
    ------
    ConfigError
        If there is no engine, the index cannot list its nodes, or `prune` is combined with `nodes`.
    """
    started = time.perf_counter()
    if prune and nodes is not None:
        raise ConfigError(
            "prune drops everything that is not in the index, but nodes are only a part of it; leave out one of them"
        )
    encoder = _encoder_of(index, text_of, None if engine is None else find_engine(engine))
    store = _store_of(index)
    found = _nodes_of(index) if nodes is None else list(nodes)
    if nodes is None and isinstance(store, BlendVectorStore):
        found = store.with_parents(found)
    pruned = 0
    if prune:
        gone = set(encoder.engine.ids()) - {node.node_id for node in found}
        pruned = encoder.engine.delete(id for id in gone if not is_part(id))
    parts: list[EncodedNodes] = []
    with tqdm(total=len(found), desc="Encoding nodes", unit="node", disable=background or not show_progress) as bar:
        start = 0
        for batch in _batches(found):

            def show(finished: int, total: int, before: int = start, size: int = len(batch)) -> None:
                # Those without text are finished from the start; other chunks of their documents may be encoded again.
                now = before + max(0, size - total + finished)
                bar.update(now - bar.n)
                if progress is not None:
                    progress(now, len(found))

            parts.append(encoder.encode(batch, progress=None if background else show, background=background))
            start += len(batch)
    if isinstance(store, BlendVectorStore) and store.engine is encoder.engine:
        store.remember(found)
        store.sync_documents(found)

    def sum_up(results: Sequence[AddResult]) -> WarmResult:
        return WarmResult(
            nodes=len(found),
            encoded=sum(result.encoded for result in results),
            named=sum(result.named for result in results),
            unchanged=sum(result.unchanged for result in results),
            tokens=sum(result.tokens for result in results),
            without_text=tuple(node_id for part in parts for node_id in part.without_text),
            failed={node_id: reason for part in parts for node_id, reason in part.failed.items()},
            pruned=pruned,
            seconds=time.perf_counter() - started,
        )

    if background:
        return WarmJob(parts, sum_up)
    return sum_up([part.done for part in parts if isinstance(part.done, AddResult)])


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
    encoder = _encoder_of(store, text_of, None if engine is None else find_engine(engine))
    if nodes is None:
        found = _nodes_of(store)
    else:
        documents = [node for node in nodes if isinstance(node, Document)]
        parsers = [each for each in Settings.transformations if isinstance(each, NodeParser)]
        split = run_transformations(documents, parsers) if documents else []
        found = [*(node for node in nodes if not isinstance(node, Document)), *split]
    wrapper = _store_of(store)
    return encoder.estimate(wrapper.with_parents(found) if isinstance(wrapper, BlendVectorStore) else found)


def _store_of(source: BaseIndex[Any] | BlendVectorStore) -> BasePydanticVectorStore | None:
    """Return the vector store that an index has, or that is given; None of an index without one; ConfigError for other things."""
    if not isinstance(source, BaseIndex | BlendVectorStore):
        raise ConfigError(
            f"a {type(source).__name__} was given for the index; give an index or a BlendVectorStore, and nodes or documents "
            "as nodes=..."
        )
    return source if isinstance(source, BlendVectorStore) else getattr(source, "vector_store", None)


def _encoder_of(
    source: BaseIndex[Any] | BlendVectorStore, text_of: TextOf | None, engine: Engine | None
) -> NodeEncoder:
    """Return what encodes the nodes of an index or a store."""
    store = _store_of(source)
    if isinstance(store, BlendVectorStore):
        if text_of is None and (engine is None or engine is store.engine):
            return store.encoder
        own = store.encoder
        return NodeEncoder(engine or store.engine, text_of or own.text_of, own.boundary)
    return NodeEncoder(find_engine(engine), text_of, Boundary())


def _batches(nodes: Sequence[BaseNode]) -> Iterator[list[BaseNode]]:
    """Yield the nodes in batches, those of a document together, since it is read once where it is handed over at once."""
    documents: dict[str, list[BaseNode]] = {}
    for node in nodes:
        documents.setdefault(node.ref_doc_id or node.node_id, []).append(node)
    batch: list[BaseNode] = []
    for pieces in documents.values():
        if batch and len(batch) + len(pieces) > _BATCH:
            yield batch
            batch = []
        batch += pieces
    if batch:
        yield batch


def _nodes_of(source: BaseIndex[Any] | BlendVectorStore) -> list[BaseNode]:
    """Return the nodes of an index as a retriever would: those of a vector store that keeps nodes, or else of the docstore."""
    store = _store_of(source)
    inner = store.inner if isinstance(store, BlendVectorStore) else store
    if inner is not None and inner.stores_text:
        try:
            return Inventory(inner).nodes()
        except NotImplementedError:
            pass
    if isinstance(source, BlendVectorStore):
        raise ConfigError(f"{type(inner).__name__} cannot list its nodes; give the index, or the nodes")
    struct: Any = source.index_struct
    node_ids: Any = getattr(struct, "nodes_dict", None) or getattr(struct, "nodes", None)
    node_ids = node_ids or getattr(struct, "node_ids", ())
    if isinstance(node_ids, dict):
        # A node that was deleted may be left in the docstore; it cannot be retrieved then.
        held = set(Inventory(inner).find() or ()) if isinstance(inner, SimpleVectorStore) else node_ids
        node_ids = [node_id for text_id, node_id in node_ids.items() if text_id in held]
    if not node_ids and inner is not None and inner.stores_text:
        raise ConfigError(
            f"{type(inner).__name__} cannot list its nodes; pass them, as in warm_index(index, nodes=[...])"
        )
    return source.docstore.get_nodes(list(node_ids), raise_error=False)
