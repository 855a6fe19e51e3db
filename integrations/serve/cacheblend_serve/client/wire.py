"""What a client of the server sends and reads: prompts and options of answers as fields of a completion, and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cacheblend_rag.chat.answer import Deadline
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef, FixedText, Segment, check_text
from cacheblend_rag.engine.protocol import StopStrings
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport, ChunkReport

__all__ = ["asked_options", "chunk_item", "parts_of", "read_report"]

_SENT = ("temperature", "top_p", "top_k", "seed")


def parts_of(prompt: BlendPrompt) -> list[dict[str, Any]]:
    """Return a prompt as the parts of a completion's; `ConfigError` if it has what is not sent to a server."""
    if not isinstance(prompt, BlendPrompt):
        raise ConfigError(
            f"the prompt is a {type(prompt).__name__}, but a server takes no schemas; give a BlendPrompt, as in "
            "BlendPrompt(text, chunks)"
        )
    for name in ("positions", "skip_unknown"):
        if getattr(prompt, name):
            raise ConfigError(f"the prompt has {name}; that needs an engine in this process")
    return [_part(each) for each in prompt.segments]


def _part(segment: Segment) -> dict[str, Any]:
    if isinstance(segment, str | FixedText):
        kind, text = ("text", segment) if isinstance(segment, str) else ("fixed", segment.text)
        check_text(text)
        return {"type": kind, "text": text}
    if isinstance(segment, ChunkRef):
        return {"type": "document", "id": segment.id}
    if isinstance(segment, Chunk):
        check_text(segment.text)
        return {"type": "document"} | chunk_item(segment)
    raise ConfigError(f"a {type(segment).__name__} cannot be sent to a server; use an engine in this process")


def chunk_item(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as it is sent; `ConfigError` if it has tokens of its own."""
    if chunk.token_ids is not None:
        raise ConfigError(f"chunk {chunk.id!r} has token_ids; that needs an engine in this process")
    return {name: value for name, value in asdict(chunk).items() if value is not None}


def asked_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], Deadline | None]:
    """Return options of transformers' ``generate`` as fields of a completion, and a time limit.

    Of stopping criteria and processors those of this package can be said in JSON: stop strings, time limits, grammars.
    """
    given = {name: value for name, value in options.items() if value is not None}
    stop = given.pop("stop_strings", [])
    stops, asked = [stop] if isinstance(stop, str) else list(stop), dict[str, Any]()
    deadline: Deadline | None = None
    for criterion in given.pop("stopping_criteria", ()):
        if isinstance(criterion, StopStrings):
            stops += criterion.stop
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
    asked |= {"stop": stops} if stops else {}
    drawn = {name: given.pop(name) for name in _SENT if name in given}
    draws = given.pop("do_sample", None)
    if draws and "temperature" not in drawn:
        raise ConfigError("do_sample without a temperature cannot be sent to a server; give temperature too")
    # Greedy decoding has no use for them, though both frameworks' objects may say them.
    asked |= {"temperature": 0} if draws is False else drawn
    if given:
        raise _unsendable(", ".join(sorted(given)))
    return asked, deadline


def _unsendable(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be sent to a server, which takes temperature, top_p, top_k, seed, stop strings and time limits; leave it "
        "out, or use an engine of this process"
    )


def read_report(said: Mapping[str, Any]) -> BlendReport:
    """Return a report that `BlendReport.to_dict` wrote."""
    return BlendReport(**{**said, "chunks": tuple(ChunkReport(**chunk) for chunk in said["chunks"])})
