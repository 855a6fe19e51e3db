"""What requests name, without a cluster."""

import json
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_ray.call import names_in
from cacheblend_serve.client.wire import parts_of

CHAT = "/v1/chat/completions"
PART = {"type": "document", "id": "a"}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": [], "documents": ["a", {"id": "b"}, {"text": "c"}, "a"]}, ("a", "b")),
        ("/v1/completions", {"prompt": "x", "documents": ["a"]}, ("a",)),
        ("/v1/completions", {"prompt": [1, 2]}, ()),
        (CHAT, {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "b"}]}]}, ("a",)),
        ("/v1/chunks", {"chunks": [{"id": "a", "text": "x", "document": "d"}, {"id": "b", "text": "y"}]}, ("d", "b")),
        ("/v1/prefetch", {"ids": ["a", "b"]}, ("a", "b")),
        ("/v1/prefetch", {"ids": [str(number) for number in range(1000)]}, tuple(map(str, range(256)))),
        ("/v1/models", {"documents": ["a"]}, ()),
        (CHAT, {"documents": {"id": "a"}, "messages": "x"}, ("a",)),
        (CHAT, {"documents": [1, None, {"id": 3}], "messages": [None, {"content": 3}]}, ()),
        (CHAT, 3, ()),
    ],
)
def test_the_documents_and_chunks_of_a_request(path: str, body: Any, names: tuple[str, ...]) -> None:
    assert names_in("POST", path, json.dumps(body).encode()) == names


def test_an_engine_of_frameworks_names_its_chunks() -> None:
    prompt = BlendPrompt(segments=["q", FixedText("f"), Chunk("text", "a"), Chunk("nameless"), ChunkRef("b")])
    body = json.dumps({"prompt": parts_of(prompt)}).encode()
    assert names_in("POST", "/v1/completions", body) == ("a", "b")


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_document_is_named_by_its_address(method: str) -> None:
    assert names_in(method, "/v1/documents/guide/one.md", b"{}") == ("guide/one.md",)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_cannot_be_read_names_nothing(body: bytes) -> None:
    assert names_in("POST", CHAT, body) == ()
