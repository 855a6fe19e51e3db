"""A request on its way from the front to a replica, and what it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ANSWERING", "Call", "names_in"]

ANSWERING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/engine/answer"})
"""Where answers are asked for, which have a time limit."""

_DOCUMENTS = "/v1/documents/"
# What has names in its body.
_NAMING = ANSWERING | {"/v1/chunks", "/v1/chunks/delete", "/v1/prefetch", "/v1/engine/add"}
# More than these say no more of where a request should go.
_MOST_NAMES = 256


@dataclass
class Call:
    """An HTTP request, read whole.

    Attributes
    ----------
    method, path, query, headers, body, client
        The request, as ASGI has it.
    names : tuple of str
        The documents and chunks that it names.
    why : str
        Why it went where it goes, once it is routed: "near" what it names, by "load" instead, or "any".
    near : tuple of str
        The replicas that it was to go to first.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None
    names: tuple[str, ...] = ()
    why: str = "any"
    near: tuple[str, ...] = ()


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
    names: dict[str, None] = {}
    for name in _named(said):
        if isinstance(name, str) and name:
            names[name] = None
            if len(names) == _MOST_NAMES:
                break
    return tuple(names)


def _named(said: Any) -> Iterator[Any]:
    if not isinstance(said, dict):
        return
    yield from _items(said.get("ids"))
    for document in _items(said.get("documents")):
        yield document.get("id") if isinstance(document, dict) else document
    for chunk in _dicts(said.get("chunks")):
        yield chunk.get("document") or chunk.get("id")
    for message in _dicts(said.get("messages")):
        for part in _dicts(message.get("content")):
            yield part.get("id") if part.get("type") == "document" else None
    prompt = said.get("prompt")
    for segment in _dicts(prompt.get("segments") if isinstance(prompt, dict) else None):
        yield segment.get("ref")
        yield from (chunk.get("id") for chunk in _dicts([segment.get("chunk")]))


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _dicts(given: Any) -> Iterator[dict[str, Any]]:
    return (item for item in _items(given) if isinstance(item, dict))
