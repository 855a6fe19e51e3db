"""One call of the engine: what is asked, what ends it early, and what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from transformers import StoppingCriteria

from cacheblend_rag import BlendPrompt, BlendReport
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError

__all__ = ["Answer", "Call", "Deadline", "EndWhenSet", "StopStrings"]

# No character takes more tokens than it has bytes in UTF-8.
_TOKENS_PER_CHAR = 4


class StopStrings(StoppingCriteria):
    """Ends a generation whose own text, not counting the prompt, holds a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tail = max(len(each) for each in stop) * _TOKENS_PER_CHAR + 1
        self._prompt_len: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each sequence is done; it is asked first when there is one token."""
        if self._prompt_len is None:
            self._prompt_len = input_ids.shape[1] - 1
        begin = max(self._prompt_len, input_ids.shape[1] - self._tail)
        texts = (self._tokenizer.decode(row[begin:].tolist(), skip_special_tokens=True) for row in input_ids)
        done = [any(each in text for each in self._stop) for text in texts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


class Deadline(StoppingCriteria):
    """Ends a generation at the first token that is later than `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout={timeout_s!r} must be a positive number of seconds, or None for no limit")
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._passed = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each sequence is done."""
        self._passed = self._passed or time.monotonic() > self._until
        return torch.full((input_ids.shape[0],), self._passed, dtype=torch.bool, device=input_ids.device)

    def check(self) -> None:
        """Raise `AnswerTimeoutError` if a generation was ended."""
        if self._passed:
            raise AnswerTimeoutError(
                f"the answer was not there after timeout={self._timeout_s:g} s, waiting for the model included; "
                "give it more time, or fewer max_tokens"
            )


class EndWhenSet(StoppingCriteria):
    """Ends a generation at the first token after an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each sequence is done."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Call:
    """One call of the engine: the prompt, the strings that end the answer, options of `BlendEngine.generate`, a time limit."""

    prompt: BlendPrompt
    stop: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    deadline: Deadline | None = None


@dataclass(frozen=True)
class Answer:
    """An answer, cut at the first stop string; `finish_reason` is "stop" at an end token or a stop string, else "length"."""

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
