"""What became of each source node, in its metadata."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import NodeWithScore

__all__ = ["ATTENTION_KEY", "STATUS_KEY", "annotate"]

ATTENTION_KEY = "blend_attention"
"""The share of the answer's attention that went to a node, 0 to 1."""

STATUS_KEY = "blend_status"
"""Why a node's KV was not used as it stands; "blended" where it was."""

_KEYS = [ATTENTION_KEY, STATUS_KEY]


def annotate(response: RESPONSE_TYPE, report: dict[str, Any]) -> RESPONSE_TYPE:
    """Write into the metadata of a response's source nodes what the report says of them; of a stream, when it ends.

    The source nodes become copies: those of the index stay as they are. No model is shown what is written. The report is filled
    by the end of the response.
    """
    nodes = response.source_nodes = [_copy(each) for each in response.source_nodes]
    if isinstance(response, StreamingResponse):
        response.response_gen = _then(response.response_gen, partial(_fill, nodes, report))
    elif isinstance(response, AsyncStreamingResponse):
        response.response_gen = _athen(response.response_gen, partial(_fill, nodes, report))
    else:
        _fill(nodes, report)
    return response


def _copy(each: NodeWithScore) -> NodeWithScore:
    node = each.node
    hidden = {
        name: [*dict.fromkeys([*getattr(node, name), *_KEYS])]
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
    }
    copied = node.model_copy(update={"metadata": dict(node.metadata), **hidden})
    return NodeWithScore(node=copied, score=each.score)


def _fill(nodes: Sequence[NodeWithScore], report: dict[str, Any]) -> None:
    calls = [*report.get("earlier_calls", ()), report]
    chunks = {chunk["id"]: chunk for call in calls for chunk in call.get("chunks", ())}
    dropped = set(report.get("dropped", ()))
    for each in nodes:
        chunk, metadata = chunks.get(each.node_id), each.node.metadata
        if chunk is not None:
            metadata[STATUS_KEY] = chunk["reason"] or "blended"
            if chunk["attention"] is not None:
                metadata[ATTENTION_KEY] = chunk["attention"]
        elif each.node_id in dropped:
            metadata[STATUS_KEY] = "the model's window had no room for it"
        else:
            metadata[STATUS_KEY] = report.get("fallback_reason") or "it has no text"


def _then(pieces: Generator[str, None, None], fill: Callable[[], None]) -> Generator[str, None, None]:
    yield from pieces
    fill()


async def _athen(pieces: AsyncGenerator[str, None], fill: Callable[[], None]) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    fill()
