"""Messages between an engine's client and its server, in JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from cacheblend_rag.chat.answer import Deadline
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef, FixedText, Segment, check_text
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.engine.generation import StopStrings
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport, ChunkReport

__all__ = [
    "AnswerCall",
    "ChunksCall",
    "Decoding",
    "IdsCall",
    "Item",
    "PromptItem",
    "SegmentItem",
    "asked_decoding",
    "known_fields",
    "read_report",
]

_MOST_CHUNKS = 10_000
_MOST_SEGMENTS = 20_000
# Of a segment that is given in token ids.
_MOST_TOKENS = 2_000_000
# Of an unknown field, in what is said of it.
_NAME_CHARS = 60


class Item(BaseModel):
    """An object of a request. Only its fields may be given; null says that one is not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        return known_fields(given, [field.alias or name for name, field in cls.model_fields.items()])


def known_fields(given: Any, known: Collection[str]) -> Any:
    """Return an object without what is null; `PydanticCustomError` if it has a field that is not known."""
    if not isinstance(given, Mapping):
        return given
    said = {name: value for name, value in given.items() if value is not None}
    for name in said:
        if name not in known:
            field = name[:_NAME_CHARS]
            words = {"field": field, "hint": did_you_mean(field, known) or "; leave it out"}
            raise PydanticCustomError("unknown_field", "not supported here{hint}", words)
    return said


def _chunk_fields(given: Any) -> Any:
    said = known_fields(given, _CHUNK_FIELDS)
    for name in ("token_ids", "positions"):
        numbers = said.get(name) if isinstance(said, Mapping) else None
        # pydantic would tell of each that is wrong, and there may be a million.
        if isinstance(numbers, list) and not all(type(each) is int for each in numbers):
            raise PydanticCustomError("int_list", "{name} are not all whole numbers", {"name": name})
    return said


_CHUNK_FIELDS = [each.name for each in fields(Chunk)]
_Chunk = Annotated[Chunk, BeforeValidator(_chunk_fields)]


class SegmentItem(Item):
    """A segment that is neither plain text nor token ids: fixed text, the id of a stored chunk, or a chunk."""

    fixed: str | None = None
    ref: str | None = None
    chunk: _Chunk | None = None

    @model_validator(mode="after")
    def _is_one(self) -> SegmentItem:
        if sum(each is not None for each in (self.fixed, self.ref, self.chunk)) != 1:
            raise ValueError("a segment must have exactly one of fixed, ref and chunk")
        return self

    def segment(self) -> Segment:
        """Return the segment."""
        if self.fixed is not None:
            return FixedText(self.fixed)
        if self.ref is not None:
            return ChunkRef(self.ref)
        assert self.chunk is not None
        return self.chunk


class PromptItem(Item):
    """A prompt, as `BlendPrompt` has it."""

    segments: list[str | Annotated[list[int], Field(max_length=_MOST_TOKENS, fail_fast=True)] | SegmentItem] = Field(
        max_length=_MOST_SEGMENTS
    )
    skip_unknown: bool = False

    @classmethod
    def of(cls, prompt: BlendPrompt) -> dict[str, Any]:
        """Return a prompt as JSON.

        Raises
        ------
        ConfigError
            If it is none, or has parts of chunks or positions, as prompts of schemas do.
        """
        if not isinstance(prompt, BlendPrompt):
            raise ConfigError(
                f"the prompt is a {type(prompt).__name__}, but a server takes no schemas; give a BlendPrompt, as in "
                "BlendPrompt(text, chunks)"
            )
        if prompt.positions is not None:
            raise ConfigError("the prompt has positions; that needs an engine in this process")
        segments = [_segment_json(each) for each in prompt.segments]
        return {"segments": segments, "skip_unknown": prompt.skip_unknown}

    def prompt(self) -> BlendPrompt:
        """Return the prompt."""
        segments = [each.segment() if isinstance(each, SegmentItem) else each for each in self.segments]
        return BlendPrompt(segments=segments, skip_unknown=self.skip_unknown)


class AnswerCall(Item):
    """A prompt and how it is answered.

    Attributes
    ----------
    blend : dict
        Settings of `BlendConfig` that are others than the engine's.
    grammar : str or None
        What the answer may be, in llguidance's form of Lark.
    thinks : bool
        Whether stop strings apply to what follows the thoughts of a model that thinks; the answer is given as it was written.
    """

    prompt: PromptItem
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=16)
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    wait_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    do_sample: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    grammar: str | None = Field(default=None, min_length=1)
    thinks: bool = False
    blend: dict[str, Any] = Field(default={}, max_length=50)


class ChunksCall(Item):
    """Chunks that are to be stored, or whose costs are to be told.

    Attributes
    ----------
    leave_out : bool
        Whether chunks that cannot be served are left out and named in the answer, instead of all being refused.
    whole : bool
        Whether they are all that their documents have.
    """

    chunks: list[_Chunk] = Field(max_length=_MOST_CHUNKS)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    leave_out: bool = False
    background: bool = False
    whole: bool = False


class IdsCall(Item):
    """Ids of chunks, and what some were made of."""

    ids: list[str] = Field(default=[], max_length=_MOST_CHUNKS)
    sources: list[str] | None = Field(default=None, max_length=_MOST_CHUNKS)


def read_report(said: Mapping[str, Any]) -> BlendReport:
    """Return a report that `BlendReport.to_dict` wrote."""
    return BlendReport(**{**said, "chunks": tuple(ChunkReport(**chunk) for chunk in said["chunks"])})


def _segment_json(segment: Segment) -> Any:
    if isinstance(segment, str | FixedText | Chunk):
        check_text(segment if isinstance(segment, str) else segment.text)
    if isinstance(segment, str):
        return segment
    if isinstance(segment, FixedText):
        return {"fixed": segment.text}
    if isinstance(segment, ChunkRef):
        return {"ref": segment.id}
    if isinstance(segment, Chunk):
        return {"chunk": asdict(segment)}
    if isinstance(segment, (list, tuple)):
        return [int(each) for each in segment]
    raise ConfigError(f"a {type(segment).__name__} cannot be sent to a server; use an engine in this process")


_DRAWN = ("temperature", "top_p", "top_k")


class Decoding(NamedTuple):
    """Options of an answer: what is sent, and its time limit."""

    asked: dict[str, Any]
    deadline: Deadline | None


def asked_decoding(options: Mapping[str, Any]) -> Decoding:
    """Return options of decoding as a server takes them.

    Parameters
    ----------
    options : Mapping
        Options of transformers' ``generate``. Of stopping criteria and logits processors those of this package can be said in
        JSON: stop strings, time limits and grammars.

    Raises
    ------
    ConfigError
        If an option cannot be sent to a server.
    """
    given = {name: value for name, value in options.items() if value is not None}
    asked: dict[str, Any] = {}
    stop = given.pop("stop_strings", [])
    stops = [stop] if isinstance(stop, str) else list(stop)
    deadline: Deadline | None = None
    for criterion in given.pop("stopping_criteria", ()):
        if isinstance(criterion, StopStrings):
            stops += criterion.stop
            asked |= {"thinks": True} if criterion.thinking is not None else {}
        elif isinstance(criterion, Deadline):
            deadline = criterion
        else:
            raise _unsendable(type(criterion).__name__)
    for processor in given.pop("logits_processor", ()):
        # A `Guide`; its class needs llguidance, which a client may not have installed.
        grammar = getattr(processor, "grammar", None)
        if not isinstance(grammar, str):
            raise _unsendable(type(processor).__name__)
        asked["grammar"] = grammar
    if stops:
        asked["stop"] = stops
    drawn = {name: given.pop(name) for name in _DRAWN if name in given}
    if "do_sample" in given:
        asked["do_sample"] = bool(given.pop("do_sample"))
    # Greedy decoding has no use for them, though both frameworks' objects may say them.
    asked |= drawn if asked.get("do_sample") is not False else {}
    if given:
        raise _unsendable(", ".join(sorted(given)))
    return Decoding(asked, deadline)


def _unsendable(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be sent to a server, which takes temperature, top_p, top_k, stop strings and time limits; leave it out, "
        "or use an engine of this process"
    )
