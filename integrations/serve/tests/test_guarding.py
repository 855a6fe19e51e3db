"""What a server lets in, what it says to the rest, and that nobody sees what is another's."""

import asyncio
import hashlib
import http.client
import json
import re
import signal
import socket
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from cacheblend_rag import BlendEngine
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_serve.app import _Guarded as Guarded
from cacheblend_serve.auth import KeyFile, Owner
from cacheblend_serve.errors import Overload
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.responses import event_stream
from cacheblend_serve.server import Gate, Server
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import AddRequest, ChatRequest, CompletionRequest, DocumentRequest, IdsRequest
from integrations.serve.tests.conftest import CHUNKS, Serve, engine_of, process_of, serving
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
    ("body", "status", "said"),
    [
        ({}, 400, "messages: Field required"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, 400, "message 0 has the role 'ghost'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content of the type 'image_url'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "has a tool call that cannot be read"),
        ({"messages": [{"role": "assistant", "tool_calls": {"id": "x"}}]}, 400, "which is not a list"),
        (SHORT | {"tools": [TOOL], "tool_choice": {"function": "x"}}, 400, "ToolChoice.type: Field required"),
        (SHORT | {"stop": ["x"] * 17}, 400, "at most 16 items"),
        (SHORT | {"documents": ["x"] * 1001}, 400, "at most 1000 items"),
        (SHORT | {"tools": [TOOL] * 1001}, 400, "at most 1000 items"),
        (SHORT | {"messages": MESSAGES * 10_001}, 400, "at most 10000 items"),
        (SHORT | {"n": 2}, 400, "n: Input should be less than or equal to 1, not 2"),
        (SHORT | {"logprobs": True}, 400, "logprobs: Input should be False, not True"),
        (SHORT | {"cache_salt": "x"}, 400, "cache_salt: not supported here; leave it out"),
        (SHORT | {"kv_transfer_params": {}}, 400, "kv_transfer_params: not supported here"),
        (SHORT | {"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        (SHORT | {"stop": [""]}, 400, "a stop string is empty"),
        (SHORT | {"documents": [{}]}, 400, "a document has neither id nor text"),
        (SHORT | {"documents": ["nobody"]}, 404, "nobody"),
        (SHORT | {"model": "other"}, 404, "the model 'other' is not served here"),
        (SHORT | {"recompute_ratio": 2.0}, 400, "recompute_ratio: Input should be less than or equal to 1"),
        (SHORT | {"response_format": {"type": "poem"}}, 400, "response_format.type: Input should be 'text'"),
        (SHORT | {"tools": [{"type": "code_interpreter"}]}, 400, "tools.0.type: Input should be 'function'"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "tokens"),
        (SHORT | {"documents": [{"id": "d", "text": f"Who is {BEYOND}?"}]}, 400, BEYOND),
        # What is not known, wherever it stands.
        (SHORT | {"document": ["a"]}, 400, "did you mean documents?"),
        (SHORT | {"temprature": 0.5}, 400, "did you mean temperature?"),
        (SHORT | {"grammar": 'root ::= "yes"'}, 400, "grammar: not supported here"),
        (SHORT | {"num_beams": False}, 400, "num_beams: not supported here"),
        (SHORT | {"documents": [{"text": "x", "txt": 0}]}, 400, "txt: not supported here, did you mean text?"),
        (SHORT | {"messages": [{"role": "user", "content": "x", "nam": 0}]}, 400, "message 0 has the field 'nam'"),
        (SHORT | {"messages": [{"role": "user", "tool_calls": [0]}]}, 400, "message 0 has the field 'tool_calls'"),
        (SHORT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "a": 0}]}]}, 400, "field 'a'"),
        (SHORT | {"messages": [{"role": "assistant", "tool_calls": [CALL | {"a": 0}]}]}, 400, "field 'a'"),
        (SHORT | {"tools": [TOOL | {"cache": 0}]}, 400, "tools.0.cache: not supported here"),
        (FORCED | {"tool_choice": TOOL | {"mode": 0}}, 400, "mode: not supported here"),
        (SHORT | {"response_format": {"type": "json_object", "schema": {}}}, 400, "schema: not supported here"),
        (SHORT | {"stream_options": {"include_usag": 0}}, 400, "include_usag: not supported here"),
        (SHORT | {"chat_template_kwargs": {"enable_thinking": False}}, 400, "takes no 'enable_thinking'"),
        (SHORT | {"chat_template_kwargs": {"messages": []}}, 400, "takes no 'messages'"),
        (SHORT | {"reasoning_effort": "none"}, 400, "takes no 'reasoning_effort'"),
        # Nothing is taken for not given but null.
        (SHORT | {"n": 0}, 400, "n: Input should be greater than or equal to 1, not 0"),
        (SHORT | {"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        (SHORT | {"top_p": 0}, 400, "top_p: Input should be greater than 0"),
        (SHORT | {"max_tokens": "3"}, 400, "max_tokens: Input should be a valid integer, not '3'"),
        (SHORT | {"tool_choice": "required"}, 400, "there are no tools"),
        (FORCED | {"response_format": {"type": "json_object"}}, 400, "leave one of them out"),
        (SHORT | {"continue_final_message": True, "add_generation_prompt": True}, 400, "exclude each other"),
    ],
)
def test_what_cannot_be_answered_is_said(tiny_client: httpx.Client, body: Any, status: int, said: str) -> None:
    assert said in error(tiny_client.post(CHAT, json=body), status)["message"]
    # In a stream too: nothing has been sent by then.
    assert said in error(tiny_client.post(CHAT, json=body | {"stream": True}), status)["message"]


def test_other_addresses_and_bodies(tiny_client: httpx.Client) -> None:
    error(tiny_client.get("/v1/nothing"), 404)
    assert "did you mean limit?" in error(tiny_client.get("/v1/chunks?limt=3"), 400)["message"]
    unstreamed = error(tiny_client.post(CHAT, json=SHORT | {"stream_options": {}}), 400)
    assert "stream_options are for streams" in unstreamed["message"]
    unknown = {"echo": True, "logprobs": 0, "suffix": "x", "best_of": 2, "messages": MESSAGES, "tools": []}
    for name, value in unknown.items():
        assert error(tiny_client.post("/v1/completions", json={"prompt": "x", name: value}), 400)["param"] == name
    chunk = {"text": "She sings.", "id": "a", "sourc": "x"}
    assert "sourc" in error(tiny_client.post("/v1/chunks", json={"chunks": [chunk]}), 400)["message"]
    error(tiny_client.get(CHAT), 405)
    assert "is not JSON" in error(tiny_client.post(CHAT, content=b"{not json", headers=JSON), 400)["message"]
    typed = tiny_client.post(CHAT, content=json.dumps(SHORT), headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error(typed, 400)["message"]
    error(tiny_client.post("/v1/completions", json={"prompt": [-1, 3]}), 400)
    error(tiny_client.post("/v1/completions", json={"prompt": ["x"] * 65}), 400)
    error(tiny_client.post("/v1/completions", json={"prompt": [{"type": "document"}]}), 400)
    error(tiny_client.post("/v1/completions", json={"prompt": "x", "grammar": "start: ("}), 400)
    error(tiny_client.post("/v1/chunks/delete", json={"ids": ["x"] * 10_001}), 400)
    error(tiny_client.get("/v1/documents/nobody"), 404)
    assert tiny_client.get("/healthz").json() == {"status": "alive"}
    assert tiny_client.get("/readyz").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [["x"] * MANY]}),
        (CompletionRequest, {"prompt": [[]] * MANY}),
        (CompletionRequest, {"prompt": "x", "documents": [5] * MANY, "stop": [5] * MANY, "bad_words": [5] * MANY}),
        (ChatRequest, {"messages": [5] * MANY}),
        (ChatRequest, {"messages": MESSAGES, "tools": [{}] * MANY, "modalities": [5] * MANY}),
        (ChatRequest, {"messages": MESSAGES, "metadata": dict.fromkeys(map(str, range(MANY)), 5)}),
        (ChatRequest, {"messages": MESSAGES} | dict.fromkeys(map(str, range(MANY)), 5)),
        (AddRequest, {"chunks": [{}] * MANY}),
        (DocumentRequest, {"chunks": [5] * MANY}),
        (IdsRequest, {"ids": [5] * MANY}),
        (CompletionRequest, {"prompt": [{"type": "document"}, {"type": "text"}, {}] * 7_000}),
    ],
)
def test_not_all_that_is_wrong_is_told(kind: type[BaseModel], body: dict[str, Any]) -> None:
    # Each error takes a while to make, and all other callers wait meanwhile.
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 20


def test_json_that_is_nested_too_deeply_and_half_characters(tiny_client: httpx.Client) -> None:
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    found = error(tiny_client.post(CHAT, content=deep, headers=JSON), 400)
    assert "nested too deeply" in found["message"]
    content = [{"type": "document", "id": "mara", "text": "half of \ud83d"}]
    half = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    found = error(tiny_client.post(CHAT, content=half, headers=JSON), 400)
    assert "half of a UTF-16 pair" in found["message"]


@pytest.fixture(scope="module")
def tiny_client(tiny: Any) -> Any:
    with engine_of(tiny) as engine, serving(engine) as address, httpx.Client(base_url=address, timeout=60) as client:
        spare_token(engine.tokenizer)
        yield client


def test_large_bodies_are_refused_before_they_are_read(serve: Serve) -> None:
    client = serve(body_bytes=2000)
    large = {"messages": [{"role": "user", "content": "x" * 3000}]}
    assert "larger than the 2000 bytes" in error(client.post(CHAT, json=large), 413)["message"]

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
        assert "did not arrive within 0.3 s" in json.loads(reply.read())["error"]["message"]
    # An answer may take longer than that.
    assert client.post(CHAT, json=LONG | {"max_tokens": 300}).status_code == 200


def test_who_may_not_ask_is_told_before_the_body_is_read(serve: Serve, tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys.json").add(Owner("acme", "mine"))
    with closing(connection_to(serve(keys=tmp_path / "keys.json"))) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        assert connection.getresponse().status == 401


def test_without_keys_it_answers_by_the_names_of_this_machine_only(serve: Serve, tmp_path: Path) -> None:
    client = serve()
    for host in ("127.0.0.1", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("rebound.example", "rebound.example:8000", "localhost.example", "127.0.0.1.example", ""):
        for path in ("/v1/models", "/healthz"):
            assert "answers as 127.0.0.1" in error(client.get(path, headers={"Host": host}), 403)["message"]
    key = KeyFile(tmp_path / "keys.json").add(Owner("acme", "mine"))
    client = serve(keys=tmp_path / "keys.json", key=key)
    assert client.get("/v1/models", headers={"Host": "rag.example"}).status_code == 200


async def test_who_reads_nothing_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_serve.responses._LIFE_S", 0.05)
    left = threading.Event()

    async def events() -> AsyncGenerator[dict[str, int], None]:
        yield {"answer": 42}

    async def wait_for_ever(*_: Any) -> Any:
        await asyncio.Event().wait()

    response = await event_stream(events(), left.set)
    await asyncio.wait_for(response({"type": "http", "method": "POST"}, wait_for_ever, wait_for_ever), 20)
    assert left.is_set()


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
    assert again.exit_code == 2 and "has a key called 'first' already" in again.output
    assert re.search(r"first\W+acme\W+5", run("list", file).output)
    assert run("remove", file, "second").exit_code == 2
    assert run("remove", file, "first").exit_code == 0
    assert "0 keys" in run("list", file).output
    (tmp_path / "keys.json").write_text("[]")
    assert "is not a key file" in run("list", file).output
    with pytest.raises(ConfigError, match="so the server needs keys"):
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


def test_a_file_of_keys_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    KeyFile(file).add(Owner("acme", "mine"))
    [written] = json.loads(file.read_text())["keys"]
    file.write_text(json.dumps({"keys": [written, written | {"digest": "0" * 64, "tenant": "other"}]}))
    with pytest.raises(ConfigError, match="has several keys called 'mine'"):
        KeyFile(file).check()
    file.write_text(json.dumps({"keys": [written | {"per_minute": 0}]}))
    with pytest.raises(ConfigError, match="per_minute=0 of the key 'mine' must be 1 or more"):
        KeyFile(file).check()


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
    refused = error(serve(requests=2).post("/v1/completions", json=many), 400)
    assert "has 3 prompts, and this server answers 2 at the same time" in refused["message"]
    gate = Gate(3)
    with gate.pass_through(2):
        with pytest.raises(Overload, match="2 requests are being answered"), gate.pass_through(2):
            pass
        with gate.pass_through():
            pass
        with pytest.raises(PromptError), gate.pass_through(4):
            pass
    with gate.pass_through(3):
        pass


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
    assert "not finished after timeout=0.05 s" in error(client.post(CHAT, json=LONG), 504)["message"]
    with client.stream("POST", CHAT, json=LONG | {"stream": True}) as reply:
        text = "".join(reply.iter_text())
    assert "not finished after timeout" in text


def test_a_gate_that_closes_waits_for_those_inside() -> None:
    gate = Gate(2)
    inside, leave = threading.Event(), threading.Event()

    def go_through() -> None:
        with gate.pass_through():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=go_through)
    thread.start()
    inside.wait()
    assert gate.is_open and not gate.drain(0.05) and not gate.is_open
    with pytest.raises(Overload, match="about to stop"), gate.pass_through():
        pass
    leave.set()
    thread.join()
    assert gate.drain(5)


def test_a_second_signal_ends_it_at_once(tiny: Any, tmp_path: Path) -> None:
    with process_of(tiny, tmp_path) as server:
        process, url = server.process, httpx.URL(server.url)
        address = url.host, url.port or 0
        # A request that never arrives would be waited for.
        with socket.create_connection(address) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
            # Once this is answered, that request has begun, and signals are heard.
            assert httpx.get(url.join("/healthz")).is_success
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _is_listened_at(address))
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == -signal.SIGTERM


def _is_listened_at(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True


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


def test_whoever_is_cut_off_by_a_server_that_stops_is_told_so(tiny: LlamaForCausalLM) -> None:
    async def forever(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def cut_off() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        scope = {"type": "http", "path": "/healthz", "headers": [(b"host", b"localhost")]}
        task = asyncio.ensure_future(Guarded(forever, server)(scope, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sent

    with engine_of(tiny) as engine:
        server = Server(EngineBackend(engine), ServeConfig())
        start, body = asyncio.run(cut_off())
    assert start["status"] == 503
    assert "was not finished" in json.loads(body["body"])["error"]["message"]
