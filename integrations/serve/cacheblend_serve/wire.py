"""Messages of clients and server: OpenAI's requests and replies, with the documents that are ours."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolReply
from cacheblend_rag.config import did_you_mean

__all__ = [
    "AddRequest",
    "ChatRequest",
    "ChunkItem",
    "CompletionRequest",
    "Decoding",
    "DocumentItem",
    "DocumentRequest",
    "IdsRequest",
    "Replies",
]

# What would be given to others' answers, or changes what is looked up for them.
_REFUSED = ("cache_salt", "kv_transfer_params")
# From how alike to a field's name an unknown one is taken to be misspelt: more than OpenAI's own are to each other.
_ALIKE = 0.86
# Of one request.
_MOST_PROMPTS, _MOST_STOPS, _MOST_DOCUMENTS, _MOST_CHUNKS = 64, 16, 1000, 10_000
# What another value than these asks for is not done, and leaving it out silently would give another answer than was asked for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class DocumentItem(BaseModel):
    """A document beside a conversation: a stored chunk by its id, or its text, or both."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(default=None, min_length=1)
    text: str | None = Field(default=None, min_length=1)
    title: str = ""

    @model_validator(mode="after")
    def _is_something(self) -> DocumentItem:
        if self.id is None and self.text is None:
            raise ValueError("a document has neither id nor text; give one of them")
        return self


class Decoding(BaseModel):
    """Fields of both kinds of requests that say how the answer is written."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _said(cls, given: Any) -> Any:
        """Leave out what is null, as many clients say of what they do not say."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    model: str | None = None
    documents: list[Annotated[str, Field(min_length=1)] | DocumentItem] = Field(default=[], max_length=_MOST_DOCUMENTS)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    ignore_eos: bool = False
    recompute_ratio: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    report: bool = False
    keep: bool = False

    @model_validator(mode="after")
    def _is_done(self) -> Decoding:
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED:
                raise ValueError(f"{name} is the server's own; leave it out")
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise ValueError(f"{name}={value!r:.40} is not supported here; leave it out")
            # Others' fields are let through; what is meant to be one of these is not left out silently.
            if name not in _NEUTRAL and (hint := did_you_mean(name, type(self).model_fields, _ALIKE)):
                raise ValueError(f"{name} is not known here{hint}")
        for each in self.stop_strings:
            if not each:
                raise ValueError("a stop string is empty; every text begins with it")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with how many tokens were used."""
        return bool(self.stream_options.get("include_usage"))

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, where the request says so."""
        return self.max_tokens


class ChatRequest(Decoding):
    """A request of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, under its newer name or its older one."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _functions(self) -> ChatRequest:
        for each in self.tools:
            function = each.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                raise ValueError(f"the tool {each!r:.80} is not a function with a name")
            if not isinstance(function.get("parameters", {}), dict | None):
                raise ValueError(f"the parameters of the tool {function['name']!r:.40} are no JSON schema")
        return self


class CompletionRequest(Decoding):
    """A request of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | Annotated[list[int], Field(min_length=1)]
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one of which is what most requests have."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        numbers = [each for each in self.prompt if isinstance(each, int)]
        return [numbers] if numbers else [each for each in self.prompt if isinstance(each, str)]


class ChunkItem(BaseModel):
    """A chunk that is to be stored; the fields are those of `cacheblend_rag.Chunk`."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)
    document: str | None = Field(default=None, min_length=1)
    start: int | None = Field(default=None, ge=0, lt=2**62)
    previous: str | None = Field(default=None, min_length=1)
    source: str | None = None


class AddRequest(BaseModel):
    """A request to store chunks."""

    model_config = ConfigDict(extra="forbid")

    chunks: list[ChunkItem] = Field(min_length=1, max_length=_MOST_CHUNKS)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    background: bool = False
    stream: bool = False


class DocumentRequest(BaseModel):
    """A request to store a document, or to replace it: its text, which is cut, or its chunks in the order of reading."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(default=None, min_length=1)
    chunks: list[str] = Field(default=[], max_length=_MOST_CHUNKS)
    chunk_tokens: int = Field(default=256, ge=8)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    background: bool = False
    stream: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> DocumentRequest:
        if (self.text is None) == (not self.chunks):
            raise ValueError("give either the document's text, or its chunks")
        if not all(self.chunks):
            raise ValueError("a chunk is empty; leave it out")
        return self


class IdsRequest(BaseModel):
    """A request about stored chunks: to forget them, or to read their KV ahead."""

    model_config = ConfigDict(extra="forbid")

    ids: list[str] = Field(min_length=1, max_length=_MOST_CHUNKS)


class Replies:
    """The replies to one request, whole or piece by piece.

    Parameters
    ----------
    model : str
        The name that clients call the model by.
    request : ChatRequest or CompletionRequest
        What was asked.

    Attributes
    ----------
    pages : list of str
        Where the pages of the answers can be looked at.
    """

    def __init__(self, model: str, request: ChatRequest | CompletionRequest) -> None:
        self.pages: list[str] = []
        self._request = request
        self._is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion" if self._is_chat else "text_completion"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def whole(self, answers: list[Answer], reply: ToolReply | None) -> dict[str, Any]:
        """Return the reply that holds the answers; `reply` is what is read of the only one where there were tools."""
        choices: list[dict[str, Any]] = []
        for number, answer in enumerate(answers):
            choice: dict[str, Any] = {"index": number, "finish_reason": _reason(answer, reply), "logprobs": None}
            if self._is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
                if reply is not None:
                    message["content"] = reply.text or (None if reply.calls else "")
                    message |= {"tool_calls": _calls(reply)} if reply.calls else {}
                choices.append(choice | {"message": message})
            else:
                choices.append(choice | {"text": answer.text})
        return self._head | {"choices": choices, "usage": _usage(answers)} | self._report(answers)

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield what a stream begins with."""
        if self._is_chat:
            yield self._piece({"delta": {"role": "assistant", "content": ""}})

    def piece(self, text: str, number: int = 0) -> dict[str, Any]:
        """Return a piece of an answer."""
        return self._piece({"delta": {"content": text}} if self._is_chat else {"text": text}, number=number)

    def end(self, answer: Answer, reply: ToolReply | None, number: int = 0) -> Iterator[dict[str, Any]]:
        """Yield what an answer ends with: the calls of tools, and why it ended."""
        if reply is not None and reply.calls:
            calls = [call | {"index": place} for place, call in enumerate(_calls(reply))]
            yield self._piece({"delta": {"tool_calls": calls}})
        rest: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        yield self._piece(rest, _reason(answer, reply), number)

    def last(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """Yield what a stream ends with, where it was asked for."""
        if self._request.tells_usage or self._request.report or self._request.keep:
            yield self._chunk_head | {"choices": [], "usage": _usage(answers)} | self._report(answers)

    def _piece(self, choice: dict[str, Any], reason: str | None = None, number: int = 0) -> dict[str, Any]:
        return self._chunk_head | {"choices": [{"index": number, **choice, "logprobs": None, "finish_reason": reason}]}

    def _report(self, answers: list[Answer]) -> dict[str, Any]:
        told: dict[str, Any] = {"pages": self.pages} if self._request.keep else {}
        return told | ({"blend": [answer.report.to_dict() for answer in answers]} if self._request.report else {})


def _reason(answer: Answer, reply: ToolReply | None) -> str:
    return "tool_calls" if reply is not None and reply.calls else answer.finish_reason


def _calls(reply: ToolReply) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in reply.calls
    ]


def _usage(answers: list[Answer]) -> dict[str, Any]:
    prompt = sum(answer.report.prompt_tokens for answer in answers)
    output = sum(answer.report.output_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
