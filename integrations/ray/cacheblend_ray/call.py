"""A request, and what it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

__all__ = ["MOST_NAMES", "Call", "names_in"]

_DOCUMENTS = "/v1/documents/"
# What has names in its body.
_NAMING = {"/v1/chat/completions", "/v1/completions", "/v1/chunks", "/v1/chunks/delete", "/v1/prefetch"}
# What holds names there, or parts that have them.
_HOLDING = ("ids", "documents", "chunks", "prompt", "messages", "content")
# More than these say no more of where a request should go.
MOST_NAMES = 256


@dataclass
class Call:
    """An HTTP request, read whole, and why it goes where it goes: "near" what it names, by "load" instead, or "any"."""

    scope: dict[str, Any]
    body: bytes
    names: tuple[str, ...] = ()
    why: str = "any"


def names_in(method: str, path: str, body: bytes) -> tuple[str, ...]:
    """Return the documents and chunks that a request names, each once; none where it cannot be read, which a replica will say."""
    if path.startswith(_DOCUMENTS):
        return (path.removeprefix(_DOCUMENTS),)
    if method != "POST" or path not in _NAMING:
        return ()
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    return tuple(islice(dict.fromkeys(_named(said)), MOST_NAMES))


def _named(said: Any, key: str = "") -> Iterator[str]:
    if isinstance(said, dict):
        yield from _named(said.get("document") or said.get("id"), "ids")
        for inner in _HOLDING:
            yield from _named(said.get(inner), inner)
    elif isinstance(said, list):
        for item in said:
            yield from _named(item, key)
    elif isinstance(said, str) and said and key in ("ids", "documents"):
        yield said
