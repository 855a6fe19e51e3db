"""Requests in OpenAI's form, with the documents that are ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cacheblend_rag.chat.render import Passage, past_call
from cacheblend_rag.chunk import Chunk, ChunkRef, FixedText, Segment
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.errors import PromptError

__all__ = [
    "AddRequest",
    "ChatRequest",
    "ChunkItem",
    "CompletionRequest",
    "Decoding",
    "DocumentItem",
    "DocumentRequest",
    "IdsRequest",
]

# Of one request.
_MOST_PROMPTS, _MOST_STOPS, _MOST_DOCUMENTS, _MOST_CHUNKS = 64, 16, 1000, 10_000
_MOST_MESSAGES, _MOST_PARTS, _MOST_TOOLS = 10_000, 20_000, 1000
# The first thing that is wrong is said: a list of a million has a million.
_Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
# Of an unknown field, in what is said of it.
_NAME_CHARS = 60


class _Sent(BaseModel):
    """An object of a request. Only its fields may be given, each of its own type; null says that one is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    # Fields of OpenAI and of other servers that are taken with the value which asks for what is done anyway, and with no other;
    # with None any value is, as no answer depends on it.
    usual: ClassVar[dict[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        known = [field.alias or name for name, field in cls.model_fields.items()]
        said = {name: value for name, value in given.items() if value is not None}
        for name in [name for name in said if name not in known]:
            usual, value = cls.usual.get(name, ...), said.pop(name)
            if usual is not None and (value != usual or isinstance(value, bool) != isinstance(usual, bool)):
                hint = did_you_mean(name[:_NAME_CHARS], known) or "; leave it out"
                words = {
                    "field": name[:_NAME_CHARS],
                    "hint": hint if usual is ... else f", except as {usual!r}; leave it out",
                }
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

    def passage(self) -> Passage[Chunk | ChunkRef]:
        """Return the chunk, by its text where there is one, below its title."""
        return Passage(self.title, Chunk(self.text, self.id) if self.text else ChunkRef(self.id or ""))


class MessageText(_Sent):
    """Text in a message, under the names that clients have for it."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class MessageRefusal(_Sent):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class MessageDocument(DocumentItem):
    """A document in a message."""

    type: Literal["document"]


_MessagePart = Annotated[MessageText | MessageRefusal | MessageDocument, Field(discriminator="type")]


class Message(_Sent):
    """A message that is no answer and no tool's result."""

    role: Literal["system", "developer", "user"]
    content: str | Annotated[list[_MessagePart], Field(max_length=_MOST_PARTS, fail_fast=True)] = ""
    name: str | None = None
    # Evaluation harnesses say of a whole message that it is text.
    usual = {"type": "text"}

    def turn(self) -> dict[str, Any]:
        """Return it as chat templates take it, its content being a list of text and chunks."""
        content: list[Any] = [self.content] if isinstance(self.content, str) else []
        for part in [] if isinstance(self.content, str) else self.content:
            content += part.passage().parts() if isinstance(part, MessageDocument) else [part.text]
        named = self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        return {"role": self.role, "content": content} | named


class ToolMessage(Message):
    """Result of a tool."""

    role: Literal["tool"]  # type: ignore[assignment]
    tool_call_id: str | None = None


class PastFunction(_Sent):
    """A function that was called."""

    name: str
    arguments: str | dict[str, Any] = ""


class PastCall(_Sent):
    """A tool call in an earlier answer; its place among those of a stream is in what clients put together of it."""

    id: str | None = None
    function: PastFunction
    usual = {"type": "function", "index": None}


class AssistantMessage(Message):
    """An earlier answer; what was thought before it is called as DeepSeek or vLLM call it."""

    role: Literal["assistant"]  # type: ignore[assignment]
    refusal: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[PastCall] = Field(default=[], max_length=_MOST_TOOLS, fail_fast=True)
    usual = Message.usual | {"annotations": []}

    def turn(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        turn = super().turn()
        turn["content"] += [self.refusal] if self.refusal else []
        thoughts = self.reasoning_content if self.reasoning is None else self.reasoning
        turn |= {} if thoughts is None else {"reasoning_content": thoughts}
        said = [past_call(call.function.name, call.function.arguments, call.id) for call in self.tool_calls]
        return turn | ({"tool_calls": said} if said else {})


_Message = Annotated[Message | ToolMessage | AssistantMessage, Field(discriminator="role")]


class StreamOptions(_Sent):
    """What a stream has beside the pieces of its answer."""

    include_usage: bool = False
    usual = {"include_obfuscation": False, "continuous_usage_stats": False}


class Decoding(_Sent):
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
    report: bool = False
    usual = (
        dict.fromkeys(("user", "safety_identifier", "metadata", "prompt_cache_key"))
        | dict.fromkeys(("n", "best_of", "length_penalty"), 1)
        | dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens"), 0)
        | dict.fromkeys(("echo", "store", "use_beam_search", "include_stop_str_in_output"), False)
        | dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True)
        | {"bad_words": [], "stop_token_ids": [], "logit_bias": {}}
        | {"prompt_cache_retention": "in_memory", "service_tier": "auto"}
    )

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


class FunctionItem(_Sent):
    """A function that may be called."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolItem(_Sent):
    """A tool that may be called, or, as a choice, the one that has to be."""

    type: Literal["function"]
    function: FunctionItem


class ChatRequest(Decoding):
    """A request of ``/v1/chat/completions``."""

    messages: list[_Message] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[ToolItem] = Field(default=[], max_length=_MOST_TOOLS, fail_fast=True)
    tool_choice: str | ToolItem | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=100)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    usual = Decoding.usual | {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "verbosity": "medium"}

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.tool_choice not in (None, "auto", "none"):
            if not self.tools:
                raise ValueError(
                    f"tool_choice={self.tool_choice!r:.80} asks for a call, and there are no tools; give tools"
                )
            if self.response_format not in (None, {"type": "text"}):
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
    grammar: str | None = Field(default=None, min_length=1)
    usual = Decoding.usual | {"suffix": ""}

    @property
    def prompts(self) -> list[Any]:
        """The prompts, one of which is what most requests have."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int | TextPart | DocumentPart):
            return [self.prompt]
        return [*self.prompt]


class StoreRequest(_Sent):
    """A request to store something."""

    background: bool = False
    stream: bool = False


class AddRequest(StoreRequest):
    """A request to store chunks; with `leave_out` those that cannot be stored are named in the reply, and the others stored."""

    chunks: list[ChunkItem] = Field(min_length=1, max_length=_MOST_CHUNKS)
    leave_out: bool = False


class DocumentRequest(StoreRequest):
    """A request to store a document, or to replace it: its text, which is cut, or its chunks in the order of reading."""

    text: str | None = Field(default=None, min_length=1)
    chunks: list[str] = Field(default=[], max_length=_MOST_CHUNKS)
    chunk_tokens: int = Field(default=256, ge=8)

    @model_validator(mode="after")
    def _is_one(self) -> DocumentRequest:
        if (self.text is None) == (not self.chunks):
            raise ValueError("give either the document's text, or its chunks")
        if not all(self.chunks):
            raise ValueError("a chunk is empty; leave it out")
        return self


class IdsRequest(_Sent):
    """A request about stored chunks: what is known of them, to read their KV ahead, or to delete them."""

    ids: list[str] = Field(min_length=1, max_length=_MOST_CHUNKS)
