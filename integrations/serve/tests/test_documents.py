"""Chunks and documents over HTTP: stored, replaced, listed, deleted, and known to the answers that follow."""

import asyncio
import gc
import json
import signal
import threading
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import StoreError
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.server import Server
from cacheblend_serve.settings import ServeConfig
from integrations.serve.tests.conftest import CHUNKS, Serve, engine_of, process_of
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
    listed = client.get("/v1/chunks", params={"limit": 2}).json()
    assert [each["id"] for each in listed["data"]] == sorted(CHUNKS)[:2] and listed["has_more"]
    rest = client.get("/v1/chunks", params={"after": listed["data"][-1]["id"]}).json()
    assert rest["data"] == [{"id": sorted(CHUNKS)[2], "document": "mara.md", "indexed": False}] and not rest["has_more"]
    assert hits(client, *CHUNKS) == (3, 0)
    assert client.post("/v1/prefetch", json={"ids": list(CHUNKS)}).status_code == 202
    assert client.post("/v1/chunks/delete", json={"ids": ["works", "nobody"]}).json() == {"deleted": 1}
    assert engine.ids() == ["mara", "house"]
    # What was read behind it is read anew.
    assert hits(client, "mara", "house") == (1, 1)


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


@pytest.mark.parametrize(
    "body", [{}, {"text": "x", "chunks": ["y"]}, {"chunks": [""]}, {"text": ""}, {"text": "x", "colour": 1}]
)
def test_what_is_no_document(serve: Serve, body: dict[str, Any]) -> None:
    assert serve().put("/v1/documents/x", json=body).status_code == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [({"chunks": [CHUNKS["house"], "word " * 3000]}, "split it"), ({"text": " \n\n "}, "'mara' is blank")],
)
def test_what_is_refused_changes_nothing(engine: BlendEngine, serve: Serve, body: dict[str, Any], said: str) -> None:
    client = serve(engine)
    put = client.put("/v1/documents/mara", json={"chunks": [CHUNKS["mara"], CHUNKS["works"]]}).json()
    refused = client.put("/v1/documents/mara", json=body)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]
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


async def test_a_failure_nobody_waits_for_is_logged(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise StoreError("the disk is full")

    server = Server(EngineBackend(engine), ServeConfig())
    server.begin(fail())
    await asyncio.sleep(0.01)
    gc.collect()
    assert "the disk is full" in caplog.text


def test_progress_is_told_while_it_is_stored(serve: Serve) -> None:
    client = serve()
    body = {"text": TEXT, "chunk_tokens": 20, "stream": True}
    with client.stream("PUT", "/v1/documents/mara", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *steps, last = map(json.loads, lines)
    assert steps[-1] == {"done": 3, "total": 3} and last["status"] == "stored"


def test_long_work_gives_signs_of_life(engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(engine)
    monkeypatch.setattr("cacheblend_serve.responses._LIFE_S", 0.01)
    with scheduler_of(engine.model):
        body = {"chunks": [{"id": "mara", "text": CHUNKS["mara"]}], "stream": True}
        with client.stream("POST", "/v1/chunks", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            told = list(islice(dropwhile(lambda line: line.startswith(":"), lines), 3))
    assert all(line.startswith(":") for line in told[1:])


async def test_encoding_is_in_nobodys_way(engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    address = serve(engine, requests=1).base_url
    is_over = threading.Event()
    monkeypatch.setattr(engine, "flush", is_over.wait)

    async def flush(client: httpx.AsyncClient) -> str:
        return (await client.post("/v1/chunks/flush")).text

    async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        waiting = [asyncio.create_task(flush(client)) for _ in range(60)]
        await asyncio.sleep(0.5)
        # More than there are threads of all.
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/v1/documents")).status_code == 200
        is_over.set()
        assert all("stored" in text for text in await asyncio.gather(*waiting))


def test_in_the_background(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    put = client.put("/v1/documents/mara", json={"text": TEXT, "background": True}).json()
    assert put["status"] == "named" and engine.document("mara") == put["ids"]
    engine.flush()
    assert hits(client, *put["ids"]) == (len(put["ids"]), 0)


def test_the_command_serves_and_what_was_acknowledged_is_kept(tiny: Any, tmp_path: Path) -> None:
    server = process_of(tiny, tmp_path)
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with server, httpx.Client(base_url=server.url, timeout=60) as client:
            # The address is told once somebody listens there.
            assert client.get("/readyz").status_code == 200
            put = client.put(f"/v1/documents/{ending.name}", json={"text": TEXT, "chunk_tokens": 20})
            assert put.json()["status"] == "stored"
            server.stop(ending)
            assert server.process.returncode == -ending
    with engine_of(tiny, store=tmp_path / "kv") as engine:
        assert len(engine.ids()) == 6
        assert engine.store.holds(engine.ids()) == [True] * 6
