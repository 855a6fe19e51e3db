"""From nodes to stored KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from llama_index.core.schema import BaseNode, NodeRelationship

from cacheblend_rag.chunk import Chunk, text_hash
from cacheblend_rag.engine import AddJob, AddResult, BlendEngine
from cacheblend_rag.errors import ConfigError, PromptError, StoreError
from llama_index_cacheblend.nodes import Boundary, TextOf, llm_text, node_chunks, placed, related

__all__ = ["EncodedNodes", "NodeEncoder", "Progress"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of finished nodes, and of all."""


@dataclass(frozen=True, slots=True)
class EncodedNodes:
    """What encoding some nodes came to: what the engine did, or will have done in the background; None if it stored less.

    `without_text` are the nodes that show the language model nothing, `failed` the others without KV, and why.
    """

    done: AddResult | AddJob | None
    without_text: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


class NodeEncoder:
    """Has an engine compute the KV of nodes, under their ids.

    Nothing that is wrong with a node, or with the place where KV is kept, is an error here: the node is computed when it is
    retrieved, and a warning says so. A node of which the model is shown something else than LlamaIndex writes (`text_of`) is
    encoded alone, since nobody says where in the document that stands; without a `boundary`, every node is.
    """

    def __init__(self, engine: BlendEngine, text_of: TextOf | None = None, boundary: Boundary | None = None) -> None:
        self.engine = engine
        self.text_of = llm_text if text_of is None else text_of
        self.boundary = boundary
        # Documents may be cut by the end of a call: what is said to come next, and has not come yet.
        self._awaited: set[str] = set()

    def encode(
        self, nodes: Sequence[BaseNode], *, progress: Progress | None = None, background: bool = False
    ) -> EncodedNodes:
        """Encode those nodes that are not stored exactly so; `progress` counts those with text.

        In the background it returns when they are named, and they are encoded when no prompt waits for the model.
        """
        chunks, failed = self._read(nodes)
        with_text = {chunk.id for chunk in chunks}
        without_text = tuple(node.node_id for node in nodes if node.node_id not in with_text | failed.keys())
        if without_text or failed:
            # An update may have left them so.
            self.engine.delete([*without_text, *failed])
        try:
            try:
                done: AddResult | AddJob = self.engine.add(chunks, progress=progress, background=background)
            except PromptError:
                failed |= self._refused(chunks)
                chunks = [chunk for chunk in chunks if chunk.id not in failed]
                done = self.engine.add(chunks, progress=progress, background=background)
        # A full disk, or a device without memory for a batch; torch has no class of its own for what devices raise.
        except (StoreError, MemoryError, RuntimeError) as error:
            return EncodedNodes(None, without_text, failed | self._not_stored(chunks, error))
        return EncodedNodes(done, without_text, failed)

    def _read(self, nodes: Sequence[BaseNode]) -> tuple[list[Chunk], dict[str, str]]:
        """Return the nodes' chunks, and the nodes of which none can be made, and why."""
        chunks: list[Chunk] = []
        failed: dict[str, str] = {}
        named = {related(node, NodeRelationship.NEXT) for node in nodes}
        followers = self._awaited | {node_id for node_id in named if node_id is not None}
        for node in nodes:
            try:
                for chunk in node_chunks([node], self.text_of):
                    is_own = self.text_of is llm_text or chunk.text == node.get_content().strip()
                    if self.boundary is not None and is_own:
                        chunk = placed(chunk, node, self.boundary, followers)
                    chunks.append(chunk)
            except (ConfigError, PromptError) as error:
                failed[node.node_id] = str(error)
        self._awaited = followers - {node.node_id for node in nodes}
        if failed:
            logger.warning(
                "%d of %d nodes are stored without KV: %s", len(failed), len(nodes), next(iter(failed.values()))
            )
        return chunks, failed

    def _refused(self, chunks: Sequence[Chunk]) -> dict[str, str]:
        """Return the chunks that the engine takes from nobody, and why; what their ids stood for before is deleted."""
        refusals = zip(chunks, self.engine.refusals(chunks), strict=True)
        refused = {str(chunk.id): str(error) for chunk, error in refusals if error is not None}
        self.engine.delete(refused)
        for node_id, reason in refused.items():
            logger.warning("node %s is stored without KV: %s", node_id, reason)
        return refused

    def _not_stored(self, chunks: Sequence[Chunk], error: Exception) -> dict[str, str]:
        """Return the chunks that were not stored; KV of a text that one of them replaced is deleted."""
        records = self.engine.records([str(chunk.id) for chunk in chunks])
        missing = [
            (chunk, record)
            for chunk, record in zip(chunks, records, strict=True)
            if record is None or record.text_hash != text_hash(chunk.text)
        ]
        logger.warning(
            "the KV of %d of %d nodes was not stored and is computed at query time: %s",
            len(missing),
            len(chunks),
            error,
        )
        with suppress(StoreError):
            self.engine.delete([str(chunk.id) for chunk, record in missing if record is not None])
        return {str(chunk.id): str(error) for chunk, _ in missing}
