"""What became of each source node, in its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import NodeWithScore

__all__ = ["ATTENTION_KEY", "STATUS_KEY", "annotate", "copies"]

ATTENTION_KEY = "blend_attention"
"""The share of the answer's attention that went to a node, 0 to 1."""

STATUS_KEY = "blend_status"
"""Why a node's KV was not used unchanged; "blended" if it was."""

_KEYS = [ATTENTION_KEY, STATUS_KEY]


def copies(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return copies of nodes to be annotated: those of the index stay as they are, and no model is shown what is written."""
    made = []
    for each in nodes:
        hidden = {
            name: [*dict.fromkeys([*getattr(each.node, name), *_KEYS])]
            for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
        }
        copied = each.node.model_copy(update={"metadata": dict(each.node.metadata), **hidden})
        made.append(NodeWithScore(node=copied, score=each.score))
    return made


def annotate(nodes: Sequence[NodeWithScore], report: dict[str, Any]) -> None:
    """Write into the metadata of source nodes what the report says of them."""
    calls = [*report.get("earlier_calls", ()), report]
    chunks = {chunk["id"]: (chunk, call) for call in calls for chunk in call.get("chunks", ())}
    dropped = set(report.get("dropped", ()))
    for each in nodes:
        found, metadata = chunks.get(each.node_id), each.node.metadata
        if found is not None:
            chunk, call = found
            is_whole = call["selector"] == "full"
            whole = call.get("fallback_reason") or "the whole prompt was computed"
            metadata[STATUS_KEY] = chunk["reason"] or (whole if is_whole else "blended")
            if chunk["attention"] is not None:
                metadata[ATTENTION_KEY] = chunk["attention"]
        elif each.node_id in dropped:
            metadata[STATUS_KEY] = "the model's window had no room for it"
        else:
            metadata[STATUS_KEY] = report.get("fallback_reason") or "it has no text"
