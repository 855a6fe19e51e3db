"""What talks to OpenAI talks to the server as it is, whatever computes behind it.

vLLM has an environment of its own; ``VLLM_PYTHON``, which ``make check-vllm`` sets, is that environment's Python.
"""

import asyncio
import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from integrations.serve.tests.conftest import serving
from integrations.serve.tests.process import LEAST, VLLM, ServerProcess

CHUNKS = [
    "Mara Lindell was born in Oslo, and moved to the north coast when she was still a child.",
    "She works for the harbour office as a rope maker, and repairs the sails of the fishing boats.",
    "Otto Brandt was born in Lisbon. He paints ships, and lives in the street behind the harbour office.",
]
QUESTION = "Where was Mara Lindell born?"
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")


@contextmanager
def by_engine() -> Iterator[str]:
    settings = engine_settings(self_check=False, separator="\n\n")
    with BlendEngine.from_pretrained("reference", **settings) as engine, serving(engine) as address:
        yield address


@contextmanager
def by_vllm(folder: Path) -> Iterator[str]:
    options = ["--model", "reference", "--store", str(folder / "kv")]
    with ServerProcess(folder / "log", *VLLM, *options, *LEAST, python=VLLM_PYTHON) as server:
        yield server.url


@pytest.fixture(scope="module", params=["engine", "vllm"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "vllm" and not VLLM_PYTHON:
        pytest.skip("vLLM is installed in an environment of its own (make check-vllm)")
    with by_engine() if request.param == "engine" else by_vllm(tmp_path_factory.mktemp("vllm")) as address:
        items = [{"id": f"c{number}", "text": text} for number, text in enumerate(CHUNKS)]
        assert httpx.post(f"{address}/v1/chunks", json={"chunks": items}, timeout=60).status_code == 200
        yield address


def test_openai_is_answered(address: str) -> None:
    asked = {"model": "reference", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
    asked |= {"temperature": 0, "extra_body": {"documents": ["c0", "c1"]}}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        reply = client.chat.completions.create(**asked)
        assert reply.usage.prompt_tokens_details.cached_tokens > 25
        whole = reply.choices[0].message.content
        pieces = [each.choices[0].delta.content or "" for each in client.chat.completions.create(**asked, stream=True)]
        assert "".join(pieces) == whole != ""
        assert len(pieces) > 4

    async def cancelled() -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(**asked | {"max_tokens": 500}, stream=True)
            await anext(aiter(stream))
            await stream.close()
            return (await client.chat.completions.create(**asked)).choices[0].message.content

    assert asyncio.run(cancelled()) == whole


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0}
POISONS: list[tuple[str, bytes | dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [3, 10**9]}),
    (COMPLETIONS, {"prompt": "word " * 20_000, "max_tokens": 8}),
    (
        CHAT,
        ASKED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
    ),
    (CHAT, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
]


def _poison(client: httpx.Client, number: int) -> bool:
    """Ask for what nobody should have, or leave while it is answered; return whether that was refused for what it is."""
    kinds = len(POISONS) + 3
    kind = number % kinds
    if kind < len(POISONS):
        path, body = POISONS[kind]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = client.post(path, content=content, headers={"Content-Type": "application/json"})
        error = openai.types.ErrorObject.model_validate(reply.json()["error"])
        return reply.status_code == 400 and bool(error.message)
    if kind == kinds - 1:
        # The server says so before it has read all of it.
        with closing(http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=60)) as connection:
            connection.putrequest("POST", CHAT)
            connection.putheader("Content-Length", str(10**9))
            connection.endheaders()
            return connection.getresponse().status == 413
    with suppress(httpx.ReadTimeout):
        # One leaves a stream that has begun, the other an answer that has not.
        long = ASKED | {"max_tokens": 400, "stream": kind == kinds - 2}
        with client.stream("POST", CHAT, json=long, timeout=0.3) as reply:
            next(reply.iter_lines())
    return True


@pytest.mark.parametrize("count", [160, pytest.param(1000, marks=pytest.mark.full)])
def test_what_one_caller_sends_hurts_no_other(address: str, count: int) -> None:
    asked = [
        ASKED,
        ASKED | {"documents": ["c0", "c1"]},
        ASKED | {"documents": [{"id": "n", "text": "Nuria Vale has a red boat."}]},
        ASKED | {"temperature": 1, "seed": 7},
    ]
    with httpx.Client(base_url=address, timeout=120) as client:

        def answer(number: int) -> Any:
            reply = client.post(CHAT, json=asked[number % len(asked)])
            return openai.types.chat.ChatCompletion.model_validate(reply.json()).choices[0].message.content

        alone = [answer(number) for number in range(len(asked))]
        with ThreadPoolExecutor(16) as pool:
            # One in eight is poisoned.
            done = pool.map(lambda n: answer(n) if n % 8 else _poison(client, n // 8), range(count))
            wrong = [n for n, got in enumerate(done) if got != (alone[n % len(asked)] if n % 8 else True)]
        assert wrong == []
        assert client.get("/readyz").status_code == 200
