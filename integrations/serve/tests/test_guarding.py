"""What a server lets in, what it says to the rest, and that nobody sees what is another's."""

import hashlib
import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from cacheblend_rag import BlendEngine
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import ConfigError
from cacheblend_serve.auth import KeyFile, Owner
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import AddRequest, ChatRequest, CompletionRequest
from integrations.serve.tests.conftest import CHUNKS, Serve, engine_of, serving
from tests.limits import wait_until
from tests.poison import BEYOND, spare_token

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where was Mara born?"}]
SHORT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3}
LONG = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1500}
TOOL = {"type": "function", "function": {"name": "weather"}}
FORCED = SHORT | {"tools": [TOOL], "tool_choice": TOOL}
CALL = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
MANY = 20_001
JSON = {"Content-Type": "application/json"}


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    found = reply.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text and "/cacheblend_rag/" not in reply.text
    return dict(found)


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        # What the description of a request cannot say, and what is said of what it does say.
        ({}, 400, "messages"),
        (SHORT | {"temprature": 0.5}, 400, "temperature"),
        (SHORT | {"documents": [{"text": "x", "txt": 0}]}, 400, "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, 400, "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "text": "half of \ud83d"}]}]}, 400, "text"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "tokens"),
        (SHORT | {"documents": [{"id": "d", "text": f"Who is {BEYOND}?"}]}, 400, BEYOND),
        (SHORT | {"documents": ["nobody"]}, 404, "nobody"),
        (SHORT | {"model": "other"}, 404, "other"),
        (SHORT | {"tool_choice": "required"}, 400, "tools"),
        (FORCED | {"tool_choice": "gcc"}, 400, "gcc"),
        (FORCED | {"response_format": {"type": "json_object"}}, 400, "response_format"),
    ],
)
def test_what_cannot_be_answered_is_said(tiny_client: httpx.Client, body: Any, status: int, named: str) -> None:
    # In a stream too: nothing has been sent by then.
    for more in ({}, {"stream": True}):
        sent = json.dumps(body | more)
        assert named in error(tiny_client.post(CHAT, content=sent, headers=JSON), status)["message"]


def test_other_addresses_and_bodies(tiny_client: httpx.Client) -> None:
    error(tiny_client.get("/v1/nothing"), 404)
    error(tiny_client.get("/v1/documents/nobody"), 404)
    error(tiny_client.get(CHAT), 405)
    assert "limit" in error(tiny_client.get("/v1/chunks?limt=3"), 400)["message"]
    assert error(tiny_client.post("/v1/completions", json={"prompt": "x", "best_of": 2}), 400)["param"] == "best_of"
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for content in (b"{not json", deep):
        error(tiny_client.post(CHAT, content=content, headers=JSON), 400)
    typed = tiny_client.post(CHAT, content=json.dumps(SHORT), headers={"Content-Type": "text/plain"})
    assert "Content-Type" in error(typed, 400)["message"]
    assert tiny_client.get("/healthz").json() == {"status": "alive"}
    assert tiny_client.get("/readyz").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "x", "documents": [5] * MANY, "stop": [5] * MANY, "bad_words": [5] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [5] * MANY}]}),
        (ChatRequest, {"messages": MESSAGES} | dict.fromkeys(map(str, range(MANY)), 5)),
        (AddRequest, {"chunks": [{}] * MANY}),
        (CompletionRequest, {"prompt": [{"type": "document"}, {"type": "text"}, {}] * 7_000}),
    ],
)
def test_not_all_that_is_wrong_is_told(kind: type[BaseModel], body: dict[str, Any]) -> None:
    # Each error takes a while to make, and all other callers wait meanwhile.
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 20


@pytest.fixture(scope="module")
def tiny_client(tiny: Any) -> Any:
    with engine_of(tiny) as engine, serving(engine) as address, httpx.Client(base_url=address, timeout=60) as client:
        spare_token(engine.tokenizer)
        yield client


def test_large_bodies_are_refused_before_they_are_read(serve: Serve) -> None:
    client = serve(body_bytes=2000)

    def pieces() -> Any:
        # Without a length in its headers.
        for _ in range(100):
            yield b"x" * 100

    # The connection may be closed under the rest of the body.
    with suppress(httpx.TransportError):
        assert client.post(CHAT, content=pieces()).status_code == 413
    assert client.post(CHAT, json=SHORT).status_code == 200


def connection_to(client: httpx.Client) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)


def test_a_request_has_to_arrive_in_time(serve: Serve) -> None:
    client = serve(body_s=0.3)
    with closing(connection_to(client)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"prompt": ')
        reply = connection.getresponse()
        assert reply.status == 408 and reply.headers["Connection"] == "close"
    # An answer may take longer than that.
    assert client.post(CHAT, json=LONG | {"max_tokens": 300}).status_code == 200


def test_without_keys_it_answers_by_the_names_of_this_machine_only(serve: Serve, tmp_path: Path) -> None:
    client = serve()
    for host in ("127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("rebound.example", "rebound.example:8000", "localhost.example", "127.0.0.1.example", ""):
        for path in ("/v1/models", "/healthz"):
            error(client.get(path, headers={"Host": host}), 403)
    key = KeyFile(tmp_path / "keys.json").add(Owner("acme", "mine"))
    client = serve(keys=tmp_path / "keys.json", key=key)
    assert client.get("/v1/models", headers={"Host": "rag.example"}).status_code == 200


def test_keys_and_tenants(engine: BlendEngine, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {tenant: KeyFile(file).add(Owner(tenant, tenant, is_admin=tenant == "acme")) for tenant in ("acme", "other")}
    text = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(key in text for key in keys.values())
    client = serve(engine, keys=file)
    for header in ("", "Bearer", "Bearer nonsense", f"Basic {keys['acme']}", f"Bearer {keys['acme'][:-1]}"):
        found = error(client.post(CHAT, json=SHORT, headers={"Authorization": header}), 401)
        assert found["code"] == "invalid_api_key"
    assert client.get("/healthz").status_code == 200

    def as_(tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {keys[tenant]}"}

    chunks = [{"id": id, "text": text} for id, text in CHUNKS.items()]
    assert client.post("/v1/chunks", json={"chunks": chunks}, headers=as_("acme")).json()["encoded"] == 3
    # What another tenant has is as what nobody has: not listed, not named, not found in messages, not deleted.
    assert client.get("/v1/chunks", headers=as_("other")).json()["data"] == []
    unknown = client.post(CHAT, json=SHORT | {"documents": ["mara"]}, headers=as_("other"))
    nobodys = client.post(CHAT, json=SHORT | {"documents": ["nobody"]}, headers=as_("other"))
    assert error(unknown, 404)["message"].replace("mara", "nobody") == error(nobodys, 404)["message"]
    plain = SHORT | {"messages": [{"role": "user", "content": f"{CHUNKS['mara']}\n\nWhere?"}], "report": True}
    reports = {tenant: client.post(CHAT, json=plain, headers=as_(tenant)).json()["blend"][0] for tenant in keys}
    assert (reports["acme"]["hits"], reports["other"]["hits"]) == (1, 0)
    assert client.post("/v1/chunks/delete", json={"ids": list(CHUNKS)}, headers=as_("other")).json() == {"deleted": 0}
    assert len(client.get("/v1/chunks", headers=as_("acme")).json()["data"]) == 3
    # Only an administrator's key sees the figures of all.
    figures = {tenant: client.get("/metrics", headers=as_(tenant)).text for tenant in keys}
    assert 'cacheblend_store_names{tenant="other"}' in figures["acme"] and 'tenant="acme"' in figures["acme"]
    assert "tenant=" not in figures["other"] and "cacheblend_store_names 0.0" in figures["other"]
    # A key that is taken back is gone with the next request.
    KeyFile(file).remove("other")
    error(client.get("/v1/models", headers=as_("other")), 401)
    assert client.get("/v1/models", headers=as_("acme")).status_code == 200


def test_the_commands_for_keys(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["keys", *arguments])

    made = run("add", file, "--name", "first", "--tenant", "acme", "--per-minute", "5")
    assert made.exit_code == 0
    key = made.output.strip()
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert KeyFile(Path(file)).owner(key) == Owner("acme", "first", 5, digest=digest)
    again = run("add", file, "--name", "first", "--tenant", "other")
    assert again.exit_code == 2
    assert re.search(r"first\W+acme\W+5", run("list", file).output)
    assert run("remove", file, "second").exit_code == 2
    assert run("remove", file, "first").exit_code == 0
    assert "0 keys" in run("list", file).output
    (tmp_path / "keys.json").write_text("[]")
    assert run("list", file).exit_code == 2
    with pytest.raises(ConfigError, match="keys"):
        ServeConfig(host="0.0.0.0")


def test_keys_that_are_made_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    names = [f"key {number}" for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        # Each as another process would, with an object of its own.
        made = list(pool.map(lambda name: KeyFile(file).add(Owner("acme", name)), names))
    found = [KeyFile(file).owner(key) for key in made]
    assert [owner and owner.name for owner in found] == names
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


def test_without_keys_nobody_is_let_in(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    key = KeyFile(file).add(Owner("acme", "mine"))
    client = serve(keys=file, key=key)
    whole = file.read_text()
    file.write_text("[]")
    refused = client.get("/v1/models")
    assert str(file) not in error(refused, 503)["message"] and refused.headers["Retry-After"]
    assert any(str(file) in record.getMessage() for record in caplog.records)
    file.write_text(whole)
    assert client.get("/v1/models").status_code == 200


def test_too_many_of_one_key(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = KeyFile(file).add(Owner("acme", "slow", per_minute=3))
    client = serve(keys=file, key=key)
    for _ in range(3):
        assert client.get("/v1/models").status_code == 200
    refused = client.get("/v1/models")
    assert error(refused, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61


def test_each_prompt_takes_a_place(serve: Serve) -> None:
    many = {"prompt": ["Who?"] * 3, "max_tokens": 1}
    client = serve(requests=2)
    error(client.post("/v1/completions", json=many), 400)
    assert client.post("/v1/completions", json=many | {"prompt": ["Who?"] * 2}).status_code == 200


def test_no_more_at_once_than_there_is_room(serve: Serve) -> None:
    client = serve(requests=1)
    with client.stream("POST", CHAT, json=LONG | {"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        refused = client.post(CHAT, json=SHORT)
        assert error(refused, 503)["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200
    # Who leaves makes room: the answer is not written to its end.
    wait_until(lambda: client.post(CHAT, json=SHORT).status_code != 503)


def test_a_client_that_goes_away_ends_its_answer(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=LONG, timeout=0.2)
    wait_until(lambda: not any(thread.name == "cacheblend-stream" for thread in threading.enumerate()))
    # The answer that was given up is in the figures, with what it had of its tokens.
    counted = engine.metrics.registry.get_sample_value("cacheblend_output_tokens_total")
    assert counted is not None and counted < 1500


def test_an_answer_that_takes_too_long(serve: Serve) -> None:
    client = serve(timeout_s=0.05)
    assert error(client.post(CHAT, json=LONG), 504)["code"] == "timeout"
    with client.stream("POST", CHAT, json=LONG | {"stream": True}) as reply:
        assert '"code":"timeout"' in "".join(reply.iter_text()).replace(" ", "")


def test_what_goes_wrong_inside_is_told_to_the_log_only(
    engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(engine)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the secret of /home/somebody")

    monkeypatch.setattr(engine, "stream", broken)
    found = error(client.post(CHAT, json=SHORT), 500)
    number = re.search(r"request (\w{12})", found["message"])
    assert number is not None and "secret" not in found["message"]
    assert any(number[1] in record.getMessage() and "secret" in str(record.exc_info) for record in caplog.records)
