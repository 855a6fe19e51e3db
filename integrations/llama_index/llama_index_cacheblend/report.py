"""Cost of an answer: the report that its response carries, and what it says of source nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from llama_index.core.schema import NodeWithScore

from cacheblend_rag.report import BlendReport, CallReport

__all__ = ["ATTENTION_KEY", "REPORT_KEY", "STATUS_KEY", "AnswerReport", "annotate"]

REPORT_KEY = "blend"
"""Key of the report in a response's metadata."""

ATTENTION_KEY = "blend_attention"
"""Key of the share of the answer's attention that went to a node, 0 to 1."""

STATUS_KEY = "blend_status"
"""Key of why a node's KV was not used unchanged; "blended" if it was."""


class AnswerReport(CallReport):
    """The `BlendReport` of an answer's last call as a dictionary, which prints as lines that people read.

    ``earlier_calls`` are the reports of the calls before it, ``dropped`` the ids of the nodes for which there was no room.
    """

    def fill(self, call: CallReport, earlier_calls: Sequence[CallReport], dropped: list[Any]) -> None:
        """Take the report of the last call."""
        self.update(call, dropped=dropped, earlier_calls=earlier_calls)
        self.last = call.last

    def __str__(self) -> str:
        if not self:
            return "no report: the answer is not finished"
        lines = []
        for call in [*self["earlier_calls"], self]:
            known = {each.name: call[each.name] for each in fields(BlendReport) if each.name in call}
            lines.append(str(BlendReport(**known)))
            lines += [f"  {chunk['id']}: {chunk['reason']}" for chunk in call["chunks"] if chunk["reason"]]
        if self["dropped"]:
            lines.append(f"no room for {', '.join(map(str, self['dropped']))}")
        return "\n".join(lines)


def annotate(nodes: Sequence[NodeWithScore], report: AnswerReport) -> None:
    """Write into the metadata of source nodes what the report says of them, if it says what the answer looked at.

    No model is shown what is written.
    """
    chunks = {chunk["id"]: (chunk, call) for call in [*report["earlier_calls"], report] for chunk in call["chunks"]}
    if all(chunk["attention"] is None for chunk, _ in chunks.values()):
        return
    for each in nodes:
        found, metadata = chunks.get(each.node_id), each.node.metadata
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
            setattr(each.node, name, [*dict.fromkeys([*getattr(each.node, name), ATTENTION_KEY, STATUS_KEY])])
        if found is not None:
            chunk, call = found
            is_whole = call["selector"] == "full"
            whole = call["fallback_reason"] or "the whole prompt was computed"
            metadata[STATUS_KEY] = chunk["reason"] or (whole if is_whole else "blended")
            if chunk["attention"] is not None:
                metadata[ATTENTION_KEY] = chunk["attention"]
        elif each.node_id in report["dropped"]:
            metadata[STATUS_KEY] = "the model's window had no room for it"
        else:
            metadata[STATUS_KEY] = report["fallback_reason"] or "it has no text"
