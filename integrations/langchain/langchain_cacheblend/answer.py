"""What is asked of the engine in one call, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from cacheblend_rag import BlendPrompt, BlendReport
from langchain_cacheblend.stop import Deadline

__all__ = ["Answer", "Call"]


@dataclass(frozen=True)
class Call:
    """One call of the engine: what is asked, and how the answer ends.

    Attributes
    ----------
    prompt : BlendPrompt
        The prompt.
    stop : tuple of str
        Strings that end the answer.
    options : dict
        Keyword arguments of `BlendEngine.generate`.
    deadline : Deadline, optional
        When the answer has to be there.
    """

    prompt: BlendPrompt
    stop: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    deadline: Deadline | None = None


@dataclass(frozen=True)
class Answer:
    """An answer, cut at the first stop string.

    Attributes
    ----------
    text : str
        What to show.
    finish_reason : str
        "stop" at an end token or a stop string, else "length".
    report : BlendReport
        What it cost.
    """

    text: str
    finish_reason: str
    report: BlendReport

    def info(self) -> dict[str, Any]:
        """Return what goes into the response metadata."""
        return {"finish_reason": self.finish_reason, "blend": self.report.to_dict()}

    def usage(self) -> UsageMetadata:
        """Return the tokens used; ``cache_read`` are the prompt tokens whose stored KV was taken as it stood."""
        report = self.report
        reused = sum(chunk.tokens - chunk.recomputed_tokens for chunk in report.chunks if chunk.hit)
        return UsageMetadata(
            input_tokens=report.prompt_tokens,
            output_tokens=report.output_tokens,
            total_tokens=report.prompt_tokens + report.output_tokens,
            input_token_details=InputTokenDetails(cache_read=reused),
        )
