"""Messages of clients and server: OpenAI's requests and replies, with the documents that are ours."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolReply
from cacheblend_rag.chunk import Chunk, ChunkRef, FixedText, Segment
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.errors import PromptError

__all__ = [
    "AddRequest",
    "ChatRequest",
    "ChunkItem",
    "CompletionRequest",
    "Decoding",
    "DeleteRequest",
    "DocumentItem",
    "DocumentRequest",
    "IdsRequest",
    "Replies",
]

# Of one request.
_MOST_PROMPTS, _MOST_STOPS, _MOST_DOCUMENTS, _MOST_CHUNKS = 64, 16, 1000, 10_000
_MOST_MESSAGES, _MOST_PARTS, _MOST_TOOLS = 10_000, 20_000, 1000
# Fields that are taken with the value that asks for what is done anyway, and refused with any other.
_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[float, Field(ge=1, le=1)]
_NoList = Annotated[list[Any], Field(max_length=0)]
# The first thing that is wrong is said: a list of a million has a million.
_Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_NoObject = Annotated[dict[str, Any], Field(max_length=0)]
# Of an unknown field, in what is said of it.
_NAME_CHARS = 60


class _Sent(BaseModel):
    """An object of a request. Only its fields may be given, each of its own type; null says that one is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        return _known_fields(given, [field.alias or name for name, field in cls.model_fields.items()])


def _known_fields(given: Any, known: Collection[str]) -> Any:
    """Return an object without what is null; `PydanticCustomError` if it has a field that is not known."""
    if not isinstance(given, Mapping):
        return given
    said = {name: value for name, value in given.items() if value is not None}
    for name in said:
        if name not in known:
            words = {"field": name[:_NAME_CHARS], "hint": did_you_mean(name[:_NAME_CHARS], known) or "; leave it out"}
            raise PydanticCustomError("unknown_field", "not supported here{hint}", words)
    return said


class DocumentItem(_Sent):
    """A document beside a conversation: a stored chunk by its id, or its text, or both."""

    id: str | None = Field(default=None, min_length=1)
    text: str | None = Field(default=None, min_length=1)
    title: str = ""

    @model_validator(mode="after")
    def _is_something(self) -> DocumentItem:
        if self.id is None and self.text is None:
            raise ValueError("a document has neither id nor text; give one of them")
        return self


class StreamOptions(_Sent):
    """What a stream has beside the pieces of its answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class Bookkeeping(_Sent):
    """Fields that say who asks and why; no answer depends on them."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] = Field(default={}, max_length=16)


class DoneAnyway(_Sent):
    """Fields of OpenAI and of other servers, each with the one value that it may have."""

    bad_words: _NoList = Field(default=[])
    best_of: _One = 1
    echo: Literal[False] = False
    frequency_penalty: _Zero = 0
    include_stop_str_in_output: Literal[False] = False
    length_penalty: _One = 1
    logit_bias: _NoObject = Field(default={})
    min_tokens: _Zero = 0
    n: _One = 1
    presence_penalty: _Zero = 0
    prompt_cache_retention: Literal["in_memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    stop_token_ids: _NoList = Field(default=[])
    store: Literal[False] = False
    use_beam_search: Literal[False] = False


class Decoding(Bookkeeping, DoneAnyway):
    """Fields of both kinds of requests that say how the answer is written."""

    model: str | None = None
    documents: list[Annotated[str, Field(min_length=1)] | DocumentItem] = Field(default=[], max_length=_MOST_DOCUMENTS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=_MOST_STOPS)] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    ignore_eos: bool = False
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    recompute_ratio: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    prompt_cache_key: str | None = Field(default=None, min_length=1, max_length=1000)
    report: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Decoding:
        if not all(self.stop_strings):
            raise ValueError("a stop string is empty; every text begins with it")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams; leave them out, or ask for stream")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end the answer."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with how many tokens were used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, where the request says so."""
        return self.max_tokens


class FunctionItem(_Sent):
    """A function that may be called."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolItem(_Sent):
    """A tool."""

    type: Literal["function"]
    function: FunctionItem


class FunctionName(_Sent):
    """The function that has to be called."""

    name: str = Field(min_length=1)


class ToolChoice(_Sent):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class SchemaItem(_Sent):
    """The JSON schema of an answer."""

    name: str
    description: str | None = None
    shape: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Sent):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaItem | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                f"type={self.type!r} and json_schema do not fit; give a json_schema with this type, and with no other"
            )
        return self


class ChatRequest(Decoding):
    """A request of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[ToolItem] = Field(default=[], max_length=_MOST_TOOLS, fail_fast=True)
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=100)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: Literal[False] = False
    modalities: list[Literal["text"]] = Field(default=[], max_length=1)
    top_logprobs: _Zero = 0
    verbosity: Literal["medium"] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer, under its newer name and its older one."""
        return min((each for each in (self.max_completion_tokens, self.max_tokens) if each is not None), default=None)

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.tool_choice not in (None, "auto", "none"):
            if not self.tools:
                raise ValueError(
                    f"tool_choice={self.tool_choice!r:.80} asks for a call, and there are no tools; give tools"
                )
            if self.response_format is not None and self.response_format.type != "text":
                raise ValueError("tool_choice asks for a call and response_format for JSON; leave one of them out")
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; leave one out")
        return self


class _Placed(_Sent):
    """What `cacheblend_rag.Chunk` has beside its id and its text."""

    document: str | None = Field(default=None, min_length=1)
    start: int | None = Field(default=None, ge=0, lt=2**62)
    body: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    source: str | None = None
    indexed: bool = False

    def chunk(self) -> Chunk:
        """Return the chunk."""
        given = self.model_dump(exclude={"type"})
        return Chunk(**given | {"body": None if self.body is None else tuple(self.body)})


class ChunkItem(_Placed):
    """A chunk that is to be stored."""

    id: str = Field(min_length=1)
    text: str = Field(min_length=1)


class TextPart(_Sent):
    """Text of a prompt; what is fixed is what many prompts begin with, and is stored like a chunk."""

    type: Literal["text", "fixed"]
    text: str

    def segment(self) -> Segment:
        """Return the segment of the prompt."""
        return FixedText(self.text) if self.type == "fixed" else self.text


class DocumentPart(_Placed):
    """A chunk of a prompt: a stored one by its id, or its text, or both."""

    type: Literal["document"]
    id: str | None = Field(default=None, min_length=1)
    text: str | None = Field(default=None, min_length=1)

    def segment(self) -> Segment:
        """Return the segment of the prompt."""
        if self.text is not None:
            return self.chunk()
        if self.id is None:
            raise PromptError("a document of the prompt has neither id nor text; give one of them")
        return ChunkRef(self.id)


_Part = Annotated[TextPart | DocumentPart, Field(discriminator="type")]


class CompletionRequest(Decoding):
    """A request of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
        | _Tokens
        | Annotated[list[_Tokens], Field(min_length=1, max_length=_MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[_Part], Field(min_length=1, max_length=_MOST_PARTS, fail_fast=True)]
    )
    suffix: Literal[""] = ""
    grammar: str | None = Field(default=None, min_length=1)

    @property
    def prompts(self) -> list[Any]:
        """The prompts, one of which is what most requests have."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int | TextPart | DocumentPart):
            return [self.prompt]
        return [*self.prompt]


class AddRequest(_Sent):
    """A request to store chunks; with `leave_out` those that cannot be stored are named in the reply, and the others stored."""

    chunks: list[ChunkItem] = Field(min_length=1, max_length=_MOST_CHUNKS)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    leave_out: bool = False
    background: bool = False
    stream: bool = False


class DocumentRequest(_Sent):
    """A request to store a document, or to replace it: its text, which is cut, or its chunks in the order of reading."""

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


class IdsRequest(_Sent):
    """A request about stored chunks: what is known of them, or to read their KV ahead."""

    ids: list[str] = Field(min_length=1, max_length=_MOST_CHUNKS)


class DeleteRequest(_Sent):
    """A request to forget chunks, by their ids or by what they were made of."""

    ids: list[str] = Field(default=[], max_length=_MOST_CHUNKS)
    sources: list[str] = Field(default=[], max_length=_MOST_CHUNKS)


class Replies:
    """The replies to one request, whole or piece by piece.

    Parameters
    ----------
    model : str
        The name that clients call the model by.
    request : ChatRequest or CompletionRequest
        What was asked.
    """

    def __init__(self, model: str, request: ChatRequest | CompletionRequest) -> None:
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
                message |= {"reasoning_content": answer.thoughts} if answer.thoughts else {}
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

    def thought(self, text: str, number: int = 0) -> dict[str, Any]:
        """Return a piece of what was thought before an answer to a chat."""
        return self._piece({"delta": {"reasoning_content": text}}, number=number)

    def end(self, answer: Answer, reply: ToolReply | None, number: int = 0) -> Iterator[dict[str, Any]]:
        """Yield what an answer ends with: the calls of tools, and why it ended."""
        if reply is not None and reply.calls:
            calls = [call | {"index": place} for place, call in enumerate(_calls(reply))]
            yield self._piece({"delta": {"tool_calls": calls}})
        rest: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        yield self._piece(rest, _reason(answer, reply), number)

    def last(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """Yield what a stream ends with, where it was asked for."""
        if self._request.tells_usage or self._request.report:
            yield self._chunk_head | {"choices": [], "usage": _usage(answers)} | self._report(answers)

    def _piece(self, choice: dict[str, Any], reason: str | None = None, number: int = 0) -> dict[str, Any]:
        return self._chunk_head | {"choices": [{"index": number, **choice, "logprobs": None, "finish_reason": reason}]}

    def _report(self, answers: list[Answer]) -> dict[str, Any]:
        return {"blend": [answer.report.to_dict() for answer in answers]} if self._request.report else {}


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
    thought = sum(answer.reasoning_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
