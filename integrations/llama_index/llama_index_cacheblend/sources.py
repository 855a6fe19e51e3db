"""What became of each source node, in its metadata."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.schema import NodeWithScore

from cacheblend_rag.engine import Engine
from cacheblend_rag.report import OTHER_TEXT

__all__ = ["ATTENTION_KEY", "STATUS_KEY", "annotate", "warn_of_other_texts"]

logger = logging.getLogger(__name__)

ATTENTION_KEY = "blend_attention"
"""The share of the answer's attention that went to a node, 0 to 1."""

STATUS_KEY = "blend_status"
"""Why a node's KV was not used unchanged; "blended" if it was."""

_KEYS = [ATTENTION_KEY, STATUS_KEY]


def annotate(nodes: Sequence[NodeWithScore], report: dict[str, Any]) -> None:
    """Write into the metadata of source nodes what the report says of them, if it says what the answer looked at.

    No model is shown what is written.
    """
    calls = [*report.get("earlier_calls", ()), report]
    chunks = {chunk["id"]: (chunk, call) for call in calls for chunk in call.get("chunks", ())}
    if all(chunk["attention"] is None for chunk, _ in chunks.values()):
        return
    dropped = set(report.get("dropped", ()))
    for each in nodes:
        found, metadata = chunks.get(each.node_id), each.node.metadata
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
            setattr(each.node, name, [*dict.fromkeys([*getattr(each.node, name), *_KEYS])])
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


_warned_of: WeakKeyDictionary[Engine, object] = WeakKeyDictionary()


def warn_of_other_texts(engine: Engine, calls: Iterable[dict[str, Any]]) -> None:
    """Warn, once for each engine, of nodes that the model is shown otherwise than they were stored."""
    others = [chunk["id"] for call in calls for chunk in call.get("chunks", ()) if chunk["reason"] == OTHER_TEXT]
    mine = object()
    # One call, which threads cannot get between.
    if others and _warned_of.setdefault(engine, mine) is mine:
        logger.warning(
            "the model is shown another text of node %s than the one whose KV is stored, so its KV is computed for the question: "
            "a postprocessor, a template or the metadata have changed it since. Say what the model is shown, and call "
            "warm_index(index) once: BlendVectorStore(store, engine=llm.engine, text_of=postprocessor) (this warning is not "
            "repeated)",
            others[0],
        )
