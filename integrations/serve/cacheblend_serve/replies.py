"""Replies in OpenAI's form, whole or piece by piece."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolReply
from cacheblend_rag.stops import Thought
from cacheblend_serve.wire import ChatRequest, CompletionRequest

__all__ = ["Replies"]


class Replies:
    """The replies to one request, whole or piece by piece."""

    def __init__(self, model: str, request: ChatRequest | CompletionRequest) -> None:
        self._request = request
        self._is_chat = isinstance(request, ChatRequest)
        kind, mark = ("chat.completion", "chatcmpl") if self._is_chat else ("text_completion", "cmpl")
        self._head: dict[str, Any] = {"id": f"{mark}-{uuid.uuid4().hex}", "object": kind}
        self._head |= {"created": int(time.time()), "model": model}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def whole(self, answers: list[Answer], reply: ToolReply | None) -> dict[str, Any]:
        """Return the reply that holds the answers; `reply` is what is read of the only one where there were tools."""
        choices: list[dict[str, Any]] = []
        for number, answer in enumerate(answers):
            said: dict[str, Any] = {"text": answer.text}
            if self._is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
                message |= {"reasoning_content": answer.thoughts} if answer.thoughts else {}
                if reply is not None:
                    message["content"] = reply.text or (None if reply.calls else "")
                    message |= {"tool_calls": _calls(reply)} if reply.calls else {}
                said = {"message": message}
            choices.append({"index": number, "finish_reason": _reason(answer, reply), "logprobs": None} | said)
        return self._head | {"choices": choices} | self._figures(answers)

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that a stream begins with."""
        return [self._piece({"delta": {"role": "assistant", "content": ""}})] if self._is_chat else []

    def piece(self, text: str, number: int = 0) -> dict[str, Any]:
        """Return a piece of an answer, or of what was thought before an answer to a chat."""
        name = "reasoning_content" if isinstance(text, Thought) else "content"
        return self._piece({"delta": {name: text}} if self._is_chat else {"text": text}, number=number)

    def end(self, answer: Answer, reply: ToolReply | None, number: int = 0) -> list[dict[str, Any]]:
        """Return the events that an answer ends with: the calls of tools, and why it ended."""
        calls = [] if reply is None else [call | {"index": place} for place, call in enumerate(_calls(reply))]
        rest: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        end = self._piece(rest, _reason(answer, reply), number)
        return [self._piece({"delta": {"tool_calls": calls}}), end] if calls else [end]

    def last(self, answers: list[Answer]) -> list[dict[str, Any]]:
        """Return the events that a stream ends with, where they were asked for."""
        asked = self._request.stream_options is not None and self._request.stream_options.include_usage
        return [self._chunk_head | {"choices": []} | self._figures(answers)] if asked or self._request.report else []

    def _piece(self, choice: dict[str, Any], reason: str | None = None, number: int = 0) -> dict[str, Any]:
        return self._chunk_head | {"choices": [{"index": number, **choice, "logprobs": None, "finish_reason": reason}]}

    def _figures(self, answers: list[Answer]) -> dict[str, Any]:
        """Return how many tokens were used, and, where that was asked for, what the answers cost."""
        reports = [answer.report for answer in answers]
        prompt, output = (sum(getattr(each, name) for each in reports) for name in ("prompt_tokens", "output_tokens"))
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(answer.cached_tokens for answer in answers)}
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)}
        told = {"blend": [report.to_dict() for report in reports]} if self._request.report else {}
        return {"usage": usage} | told


def _reason(answer: Answer, reply: ToolReply | None) -> str:
    return "tool_calls" if reply is not None and reply.calls else answer.finish_reason


def _calls(reply: ToolReply) -> list[dict[str, Any]]:
    said = [(call, json.dumps(call.arguments, ensure_ascii=False)) for call in reply.calls]
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}} for call, text in said
    ]
