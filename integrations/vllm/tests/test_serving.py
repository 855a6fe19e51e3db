"""The server with vLLM behind it, as people start it, against the engine over the same store."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own (make check-vllm)")

from vllm_cacheblend.backend import VLLMBackend

from cacheblend_lab.reference import WEIGHTS_DIR as WEIGHTS
from cacheblend_lab.reference.corpus import Example, examples
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.stops import Thinking
from cacheblend_serve.backend import Asked
from integrations.serve.tests.process import LEAST, VLLM, ServerProcess
from integrations.vllm.tests.conftest import engine_answer, wait_until_gone
from tests.engines import documents_of

pytestmark = pytest.mark.timeout(600)

NUM_QUESTIONS = 8


def serving(store: Path, log: Path) -> ServerProcess:
    """Return a server with vLLM over a store."""
    return ServerProcess(log, *VLLM, "--store", str(store), *LEAST)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def address(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(store, tmp_path_factory.mktemp("log") / "log") as server:
        yield server.url


@pytest.fixture(scope="module")
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def example(http: httpx.Client) -> Example:
    """A context whose documents vLLM has encoded."""
    [example] = examples(NUM_QUESTIONS)
    for document in example.documents:
        reply = http.put(f"/v1/documents/{document.title}", json={"chunks": list(document.chunks)})
        assert reply.json()["encoded"] == len(document.chunks)
    return example


def request_for(example: Example, question: str) -> dict[str, Any]:
    named = [document.title for document in reversed(example.documents)]
    return {"messages": [{"role": "user", "content": f"Question: {question}"}], "documents": named, "max_tokens": 32}


def test_answers_are_those_of_the_engine_over_the_same_store(http: httpx.Client, example: Example, store: Path) -> None:
    config = EngineConfig(separator="\n\n", dtype="float32", prefix_bytes=0)
    with BlendEngine.from_pretrained(WEIGHTS, store=store, config=config) as engine:
        for question in example.questions:
            body = request_for(example, question.text)
            reply = http.post("/v1/chat/completions", json=body | {"report": True}).json()
            answer = engine_answer(engine, body)
            # What vLLM encoded the engine serves.
            assert all(chunk.hit for chunk in answer.report.chunks)
            assert reply["choices"][0]["message"]["content"] == answer.text
            assert reply["choices"][0]["finish_reason"] == answer.finish_reason
            assert reply["usage"]["prompt_tokens"] == answer.report.prompt_tokens
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == answer.cached_tokens
            [report] = reply["blend"]
            assert (report["hits"], report["misses"]) == (len(example.chunks), 0)
            assert [chunk["id"] for chunk in report["chunks"]] == [chunk.id for chunk in answer.report.chunks]


def test_an_answer_is_held_to_a_schema(http: httpx.Client, example: Example) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    asked = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    body = request_for(example, "Is it so?") | {"response_format": asked}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] in ('{"yes": true}', '{"yes": false}')


def test_how_tokens_are_drawn(http: httpx.Client, example: Example) -> None:
    def drawn(**how: Any) -> str:
        body = request_for(example, "Who?") | {"temperature": 1, "seed": 0} | how
        return str(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])

    likeliest = drawn(temperature=0)
    assert drawn(min_p=1) == drawn(top_k=1) == drawn(temperature=1e-300) == likeliest
    assert drawn(temperature=0, repetition_penalty=100) != likeliest
    assert drawn() == drawn(min_p=0, top_k=0, top_p=1, repetition_penalty=1)


def test_what_vllm_cannot_do_is_said(http: httpx.Client, example: Example) -> None:
    body = request_for(example, "Who?")
    refused = http.post("/v1/chat/completions", json=body | {"recompute_ratio": 0.5})
    assert refused.status_code == 400
    assert "--backend engine" in refused.json()["error"]["message"]
    long = {"prompt": "word " * 3000, "max_tokens": 1}
    refused = http.post("/v1/completions", json=long)
    assert refused.status_code == 400
    assert http.get("/readyz").json() == {"status": "ready"}


def test_what_was_acknowledged_is_there_when_the_server_was_killed(tmp_path: Path) -> None:
    store = tmp_path / "kv"
    with serving(store, tmp_path / "log") as server:
        started = server.children()
        assert started
        texts = [f"Person {number} keeps a cat and lives by the sea." for number in range(3)]
        for number, text in enumerate(texts):
            assert httpx.put(f"{server.url}/v1/documents/{number}", json={"text": text}, timeout=60).status_code == 200
        server.stop(signal.SIGKILL)
        # vLLM does not outlive who started it.
        wait_until_gone(started)
    with BlendEngine.from_pretrained(
        WEIGHTS, store=store, config=EngineConfig(separator="\n\n", dtype="float32")
    ) as engine:
        assert sorted(documents_of(engine, engine.ids())) == ["0", "1", "2"]


@pytest.mark.full
def test_the_server_ends_when_vllm_does(tmp_path: Path) -> None:
    with serving(tmp_path / "kv", tmp_path / "log") as server:
        [core] = [pid for pid in server.children() if "EngineCore" in " ".join(psutil.Process(pid).cmdline())]
        left = server.children()
        os.kill(core, signal.SIGKILL)
        assert server.process.wait(60) != 0
        wait_until_gone(left)


class Saying:
    """An engine that says what a test has it say."""

    window = 4096

    def __init__(self, said: Sequence[str]) -> None:
        self._said = said
        self.options: dict[str, Any] = {}

    def own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    async def stream(self, prompt: Any, options: dict[str, Any], limit: Any) -> AsyncGenerator[Any, None]:
        self.options = options
        for number, text in enumerate(self._said, start=1):
            reason = "length" if number == len(self._said) else None
            choice = SimpleNamespace(text=text, token_ids=[1], finish_reason=reason)
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=0)


@pytest.mark.parametrize("is_raw", [False, True])
async def test_a_stop_string_in_thoughts_ends_nothing(is_raw: bool) -> None:
    said = ["<think>\nHe. ", "She.\n</th", "ink>\n\nShe ", "does. And", " more."]
    thinking = Thinking("<think>", "</think>")
    asked = Asked(BlendPrompt(segments=["Who?"]), None, 99, (". ",), 30, thinking=thinking, is_raw=is_raw)
    with BlendEngine.from_pretrained("reference") as library:
        speaking: Any = Saying(said)
        *pieces, answer = [piece async for piece in VLLMBackend("reference", library, speaking).answer(library, asked)]
    assert (speaking.options["stop"], speaking.options["skip_special_tokens"]) == ([], False)
    assert isinstance(answer, Answer)
    if is_raw:
        assert "".join(map(str, pieces)) == answer.text == "".join(said[:4])
    else:
        assert (pieces, answer.text) == (["He. ", "She.", "She ", "does"], "She does")
