"""What requests name."""

import json
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Chunk, FixedText
from cacheblend_ray.nearness import names_in
from cacheblend_serve.client.wire import PromptItem

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": [], "documents": ["a", {"id": "b"}, {"text": "c"}, "a"]}, ("a", "b")),
        ("/v1/completions", {"prompt": "x", "documents": ["a"]}, ("a",)),
        ("/v1/completions", {"prompt": [1, 2]}, ()),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "document", "id": "a"}, {"type": "text", "id": "b"}]}]},
            ("a",),
        ),
        ("/v1/chunks", {"chunks": [{"id": "a", "text": "x", "document": "d"}, {"id": "b", "text": "y"}]}, ("d", "b")),
        ("/v1/prefetch", {"ids": ["a", "b"]}, ("a", "b")),
        ("/v1/models", {"documents": ["a"]}, ()),
        (CHAT, {"documents": {"id": "a"}, "messages": "x"}, ()),
        (CHAT, {"documents": [1, None, ["a"], {"id": 3}], "messages": [None, {"content": 3}]}, ()),
        (CHAT, ["a"], ()),
    ],
)
def test_the_documents_and_chunks_of_a_request(path: str, body: Any, names: tuple[str, ...]) -> None:
    assert names_in("POST", path, json.dumps(body).encode()) == names


def test_an_engine_of_frameworks_names_its_chunks() -> None:
    prompt = BlendPrompt(segments=["q", FixedText("f"), Chunk("text", "a"), Chunk("nameless"), [1, 2]])
    segments = PromptItem.of(prompt) | {"skip_unknown": True}
    segments["segments"].append({"ref": "b"})
    assert names_in("POST", "/v1/engine/answer", json.dumps({"prompt": segments}).encode()) == ("a", "b")


def test_a_document_is_named_by_its_address() -> None:
    assert names_in("PUT", "/v1/documents/guide/one.md", b"{}") == ("guide/one.md",)
    assert names_in("DELETE", "/v1/documents/guide/one.md", b"") == ("guide/one.md",)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"3"])
def test_what_cannot_be_read_names_nothing(body: bytes) -> None:
    assert names_in("POST", CHAT, body) == ()


def test_a_request_says_enough_with_so_many_names() -> None:
    body = json.dumps({"ids": [str(number) for number in range(1000)]}).encode()
    assert len(names_in("POST", "/v1/prefetch", body)) == 256
