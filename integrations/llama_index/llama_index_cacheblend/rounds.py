"""The calls that one answer takes: one, or several where contexts over the window are refined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import BaseModel

from cacheblend_rag.chunk import Chunk
from llama_index_cacheblend.context import ContextPrompt

__all__ = ["ModelResponse", "Rounds"]

ModelResponse = ChatResponse | CompletionResponse


@dataclass
class Rounds:
    """What has been asked of a question, and what is still to be asked.

    Attributes
    ----------
    query_str : str
        The question.
    chunks : sequence of Chunk
        The context that no call has read yet.
    values : dict
        Further variables of the templates.
    answer : str or None
        The answer so far.
    report : dict
        What ``response.metadata["blend"]`` will be.
    earlier_calls : list of dict
        The reports of the calls before the last.
    dropped : list of Chunk
        Context that no call has read or will read.
    last : str, BaseModel or None
        The answer so far, as it was read from what the model wrote.
    """

    query_str: str
    chunks: Sequence[Chunk]
    values: dict[str, Any]
    answer: str | None
    report: dict[str, Any]
    earlier_calls: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[Chunk] = field(default_factory=list)
    last: str | BaseModel | None = None

    def variables(self) -> tuple[str, dict[str, Any]]:
        """Return the variable for the context in LlamaIndex's template of the next call, and the values of the others."""
        values = {"query_str": self.query_str, **self.values}
        if self.answer is None:
            return "context_str", values
        return "context_msg", values | {"existing_answer": self.answer}

    def refine(self, prompt: ContextPrompt, response: ModelResponse, answer: str | BaseModel) -> None:
        """Go on to the chunks that the last prompt left over."""
        # LlamaIndex starts over where a model wrote nothing.
        self.last = answer or self.last
        self.answer = self.last.model_dump_json() if isinstance(self.last, BaseModel) else self.last or self.answer
        self.chunks = prompt.left_over
        self.dropped += prompt.dropped
        self.earlier_calls.append(_call_report(prompt, response))

    def end(self, prompt: ContextPrompt, response: ModelResponse) -> None:
        """Fill the report; `response` is the last call's."""
        self._fill(_call_report(prompt, response), [*self.dropped, *prompt.dropped])

    def give_up(self) -> None:
        """Fill the report; the call that answered last is the last, since beside its answer no chunk has room any more."""
        self._fill(self.earlier_calls.pop(), [*self.dropped, *self.chunks])

    def _fill(self, report: dict[str, Any], dropped: Sequence[Chunk]) -> None:
        self.report.update(report, dropped=[chunk.id for chunk in dropped], earlier_calls=self.earlier_calls)


def _call_report(prompt: ContextPrompt, response: ModelResponse) -> dict[str, Any]:
    assert response.raw is not None
    report: dict[str, Any] = response.raw["blend"]
    return report if prompt.fallback_reason is None else report | {"fallback_reason": prompt.fallback_reason}
