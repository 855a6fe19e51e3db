"""Chunks and documents over HTTP: stored, replaced, listed, deleted, and known to the answers that follow."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, FixedText
from cacheblend_rag.engine.backend import scheduler_of
from cacheblend_serve import ServedEngine
from integrations.serve.tests.conftest import CHUNKS, Serve, engine_of, serving
from tests.limits import wait_until

TEXT = "\n\n".join(CHUNKS.values())
MESSAGES = [{"role": "user", "content": "Where was Mara born?"}]


def hits(client: httpx.Client, *ids: str) -> tuple[int, int]:
    body = {"messages": MESSAGES, "documents": ids, "max_tokens": 1, "temperature": 0, "report": True}
    report = client.post("/v1/chat/completions", json=body).json()["blend"][0]
    return report["hits"], report["misses"]


def test_chunks_come_and_go(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    chunks = [
        {"id": id, "text": text, "document": "mara.md", "start": 50 * n} for n, (id, text) in enumerate(CHUNKS.items())
    ]
    stored = client.post("/v1/chunks", json={"chunks": chunks}).json()
    assert stored["ids"] == list(CHUNKS) and (stored["encoded"], stored["status"]) == (3, "stored")
    assert client.post("/v1/chunks", json={"chunks": chunks}).json()["unchanged"] == 3
    assert engine.document("mara.md") == list(CHUNKS)
    assert hits(client, *CHUNKS) == (3, 0)
    assert client.post("/v1/prefetch", json={"ids": list(CHUNKS)}).status_code == 202
    assert client.post("/v1/chunks/delete", json={"ids": ["works", "nobody"]}).json() == {"deleted": 1}
    assert engine.ids() == ["mara", "house"]
    # What was read behind it is read anew.
    assert hits(client, "mara", "house") == (1, 1)


def pages(client: httpx.Client, path: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more:
        page = client.get(path, params={"limit": limit, "after": found[-1]["id"] if found else ""}).json()
        assert len(page["data"]) == limit or not page["has_more"]
        found, has_more = found + page["data"], page["has_more"]
    return found


@settings(max_examples=10, deadline=None)
@given(
    ids=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), unique=True),
    limit=st.integers(1, 5),
)
def test_a_list_has_everything_once_in_order_whatever_its_pages(listing: Any, ids: list[str], limit: int) -> None:
    engine, client = listing
    engine.delete(engine.ids())
    chunks = [Chunk(CHUNKS["mara"], id, document=id[:1] if n % 2 else None) for n, id in enumerate(ids)]
    engine.add(chunks)
    wanted = [{"id": each.id, "document": each.document} for each in chunks]
    assert pages(client, "/v1/chunks", limit) == sorted(wanted, key=lambda each: each["id"])
    documents = {each.document for each in chunks if each.document is not None}
    assert [each["id"] for each in pages(client, "/v1/documents", limit)] == sorted(documents)


@pytest.fixture(scope="module")
def listing(tiny: LlamaForCausalLM) -> Iterator[Any]:
    with engine_of(tiny) as engine, serving(engine) as address, httpx.Client(base_url=address, timeout=60) as client:
        # A fixed head is stored too, and is no chunk.
        engine.generate(
            BlendPrompt(FixedText("Answer from the context only, please."), [Chunk(CHUNKS["mara"])], "?"), 1
        )
        assert engine.heads()
        yield engine, client


def test_a_document_is_cut_replaced_and_deleted(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    put = client.put("/v1/documents/notes/mara.md", json={"text": TEXT, "chunk_tokens": 20}).json()
    assert len(put["ids"]) == 3 and put["encoded"] == 3
    assert client.get("/v1/documents/notes/mara.md").json()["chunks"] == put["ids"]
    assert client.get("/v1/documents").json()["data"] == [{"id": "notes/mara.md"}]
    # The last passage changes: the others keep their names, and are read anew since they were read behind it.
    changed = [*list(CHUNKS.values())[:2], "Her house was sold."]
    replaced = client.put("/v1/documents/notes/mara.md", json={"chunks": changed}).json()
    assert replaced["ids"][:2] == put["ids"][:2] and replaced["ids"][2] != put["ids"][2]
    assert (replaced["encoded"], replaced["unchanged"]) == (3, 0)
    assert engine.document("notes/mara.md") == replaced["ids"]
    assert hits(client, *replaced["ids"]) == hits(client, "notes/mara.md") == (3, 0)
    # KV is that of the document.
    ours, other = (engine.prefill(BlendPrompt("", ids, "?")).logits for ids in (replaced["ids"], replaced["ids"][::-1]))
    assert not bool((ours == other).all())
    assert client.delete("/v1/documents/notes/mara.md").json() == {"deleted": 3}
    assert client.get("/v1/documents/notes/mara.md").status_code == 404
    assert client.delete("/v1/documents/notes/mara.md").status_code == 404
    assert engine.ids() == []


@pytest.mark.parametrize("name", [".", "..", "a\nb", "a/../b", "/a//", "ü?b#c%2F", "\0"])
def test_any_name_names_a_document(listing: Any, name: str) -> None:
    _, client = listing
    address = "/v1/documents/" + quote(name, safe="").replace(".", "%2E")
    assert client.put(address, json={"text": TEXT}).status_code == 200
    assert client.get(address).json()["id"] == name
    with ServedEngine(str(client.base_url)) as served:
        assert served.document(name) == client.get(address).json()["chunks"]
    assert client.delete(address).status_code == 200
    assert client.put("/v1/documents/%20", json={"text": TEXT}).status_code == 400


BLANKS = st.text(" \t\n\r\u00a0", min_size=1)


@settings(max_examples=20, deadline=None)
@given(st.tuples(BLANKS, BLANKS, BLANKS, BLANKS))
def test_the_text_of_a_document_is_found_in_a_message(listing: Any, blanks: tuple[str, ...]) -> None:
    engine, client = listing
    engine.delete(engine.ids())
    text = "".join(chain.from_iterable(zip(blanks, [*CHUNKS.values(), ""], strict=True)))
    put = client.put("/v1/documents/mara", json={"text": text, "chunk_tokens": 20}).json()
    body = {"messages": [{"role": "user", "content": f"{text}Where was Mara born?"}], "max_tokens": 1, "report": True}
    found = client.post("/v1/chat/completions", json=body).json()["blend"][0]["chunks"]
    assert [each["id"] for each in found if each["hit"]] == put["ids"]


@pytest.mark.parametrize(
    "body",
    [
        {"chunks": [CHUNKS["house"], "word " * 3000]},
        {"text": " \n\n "},
        {"text": "x", "chunks": ["y"]},
        {"chunks": [""]},
        {},
    ],
)
def test_what_is_refused_changes_nothing(engine: BlendEngine, serve: Serve, body: dict[str, Any]) -> None:
    client = serve(engine)
    put = client.put("/v1/documents/mara", json={"chunks": [CHUNKS["mara"], CHUNKS["works"]]}).json()
    assert client.put("/v1/documents/mara", json=body).status_code == 400
    assert engine.document("mara") == put["ids"]
    assert hits(client, "mara") == (2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_does_not_end_what_is_stored(engine: BlendEngine, serve: Serve, stream: bool) -> None:
    client = serve(engine, requests=1)
    with scheduler_of(engine.model):
        with pytest.raises(httpx.ReadTimeout):
            client.put("/v1/documents/mara", json={"text": TEXT, "chunk_tokens": 20, "stream": stream}, timeout=0.5)
        # It is counted until it is done.
        assert client.put("/v1/documents/other", json={"text": TEXT}).status_code == 503
    wait_until(lambda: engine.document("mara"))
    wait_until(lambda: client.put("/v1/documents/other", json={"text": TEXT}).status_code != 503)
    assert hits(client, "mara") == (3, 0)


def test_progress_is_told_while_it_is_stored(serve: Serve) -> None:
    client = serve()
    body = {"text": TEXT, "chunk_tokens": 20, "stream": True}
    with client.stream("PUT", "/v1/documents/mara", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *steps, last = map(json.loads, lines)
    assert steps[-1] == {"done": 3, "total": 3} and last["status"] == "stored"
