"""How vLLM is asked, at a unix socket where a test says what is answered."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import anyio.to_thread
import pytest
from transformers import GenerationConfig
from vllm_cacheblend.backend import VLLMBackend
from vllm_cacheblend.client import TimeLimit, VLLMClient

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import AnswerTimeoutError, BackendError, PromptError
from cacheblend_rag.thoughts import Thinking
from cacheblend_serve.backend import Asked

END = "data: [DONE]\n\n"


class Saying(ThreadingMixIn, UnixStreamServer):
    """Answers each request for a completion with a status, by its number, and then pieces; None says nothing more."""

    daemon_threads = True

    def __init__(self, path: Path, said: tuple[int | str | None, ...]) -> None:
        super().__init__(str(path), Handler)
        self.said = said
        self.asked: list[dict[str, Any]] = []
        self.is_over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Saying

    def do_GET(self) -> None:
        self.say(200, json.dumps({"data": [{"id": "model", "max_model_len": 64}]}))

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.say(*self.server.said)

    def say(self, *said: int | str | None) -> None:
        for each in said:
            if isinstance(each, int):
                self.send_response(each)
                self.end_headers()
            elif each is not None:
                self.wfile.write(each.encode())
            else:
                self.server.is_over.wait()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def saying(folder: Path, *said: int | str | None) -> Iterator[tuple[VLLMClient, Saying]]:
    path = folder / "vllm.sock"
    with Saying(path, said) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        client = VLLMClient(path)
        try:
            yield client, server
        finally:
            client.close()
            server.is_over.set()
            server.shutdown()
            thread.join()


def event(text: str, reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': reason}]})}\n\n"


async def told(client: VLLMClient, timeout_s: float = 30) -> list[dict[str, Any]]:
    return [each async for each in client.stream({"prompt": [1, 2]}, TimeLimit(timeout_s))]


async def test_events_come_as_they_are_said(tmp_path: Path) -> None:
    with saying(tmp_path, 200, event("She "), ": a comment\n\n", event("does", "stop"), END) as (client, server):
        assert client.is_up()
        assert [each["choices"][0]["text"] for each in await told(client)] == ["She ", "does"]
        assert [(each["model"], each["stream"], each["prompt"]) for each in server.asked] == [("model", True, [1, 2])]


async def test_a_line_of_a_text_is_no_end_of_an_event(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x1cfive\x0bsix"
    said = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}, ensure_ascii=False)
    with saying(tmp_path, 200, f"data: {said}\r\n\r\n", END) as (client, _):
        assert [each["choices"][0]["text"] for each in await told(client)] == [text]


@pytest.mark.parametrize("said", [(), (200,), (200, event("She "))], ids=["reply", "first event", "next event"])
async def test_whatever_is_waited_for_takes_the_time_of_the_answer(tmp_path: Path, said: tuple[int | str, ...]) -> None:
    with saying(tmp_path, *said, None) as (client, _):
        client.model()
        with pytest.raises(AnswerTimeoutError, match=r"after 0\.2 s"):
            await told(client, 0.2)


async def test_a_thread_is_waited_for_no_longer_than_the_rest() -> None:
    is_over = threading.Event()
    limit = TimeLimit(0.1)
    with pytest.raises(AnswerTimeoutError):
        await limit.wait(anyio.to_thread.run_sync(is_over.wait, abandon_on_cancel=True))
    is_over.set()


@pytest.mark.parametrize(
    ("said", "kind", "match"),
    [
        ((200, event("She ")), BackendError, "broke off"),
        ((200, 'data: {"error": {"message": "out of memory"}}\n\n', END), BackendError, "broke off: .*out of memory"),
        ((200, "data: {\n\n"), BackendError, "not an event"),
        ((500, "the engine has died"), BackendError, "status 500: the engine has died"),
        ((401, '{"error": "Unauthorized"}'), BackendError, "status 401"),
        ((400, '{"error": {"message": "too long"}}'), PromptError, "refuses this: too long"),
        ((), BackendError, "cannot be reached"),
    ],
)
async def test_bad_answers_are_told(tmp_path: Path, said: tuple[int | str, ...], kind: Any, match: str) -> None:
    with saying(tmp_path, *said) as (client, _):
        with pytest.raises(kind, match=match):
            await told(client)


def test_a_server_that_is_not_there_is_told() -> None:
    client = VLLMClient("http://127.0.0.1:1/")
    assert not client.is_up()
    with pytest.raises(BackendError, match=r"cannot be reached at http://127\.0\.0\.1:1"):
        client.model()
    client.close()


def test_prompts_are_warmed_under_their_salt(tmp_path: Path) -> None:
    with saying(tmp_path, 200, "{}") as (client, server):
        client.warm([("0" * 32, (1, 2)), ("1" * 32, (1, 3))], "theirs", is_awaited=False)
        assert sorted(each["prompt"] for each in server.asked) == [[1, 2], [1, 3]]
        assert {each["cache_salt"] for each in server.asked} == {"theirs"}


THINKING = Thinking("<think>", "</think>")


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained("reference") as engine:
        yield engine


async def answered(engine: BlendEngine, client: VLLMClient) -> list[str | Answer]:
    asked = Asked(BlendPrompt(segments=["Who?"]), max_tokens=None, limit_tokens=8, stop=(), timeout_s=30)
    backend = VLLMBackend("reference", engine, client, GenerationConfig())
    return [piece async for piece in backend.answer(engine, asked)]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_an_answer_ends_for_the_reason_that_vllm_tells(engine: BlendEngine, tmp_path: Path, reason: str) -> None:
    with saying(tmp_path, 200, event("She "), event("does", reason), END) as (client, _):
        *pieces, answer = await answered(engine, client)
    assert pieces == ["She ", "does"]
    assert isinstance(answer, Answer)
    assert (answer.text, answer.finish_reason) == ("She does", reason)


@pytest.mark.parametrize("is_raw", [False, True])
async def test_a_stop_string_in_thoughts_ends_nothing(engine: BlendEngine, tmp_path: Path, is_raw: bool) -> None:
    said = ["<think>\nHe. ", "She.\n</th", "ink>\n\nShe ", "does. And", " more."]
    asked = Asked(BlendPrompt(segments=["Who?"]), None, 99, (". ",), 30, thinking=THINKING, is_raw=is_raw)
    with saying(tmp_path, 200, *map(event, said), END) as (client, server):
        backend = VLLMBackend("reference", engine, client, GenerationConfig())
        *pieces, answer = [piece async for piece in backend.answer(engine, asked)]
        assert (server.asked[-1]["stop"], server.asked[-1]["skip_special_tokens"]) == ([], False)
    assert isinstance(answer, Answer)
    if is_raw:
        assert "".join(map(str, pieces)) == answer.text == "".join(said[:4])
    else:
        assert (pieces, answer.text) == (["He. ", "She.", "She ", "does"], "She does")
        assert (answer.thoughts, answer.finish_reason) == ("He. She.", "stop")
    assert 0 <= answer.reasoning_tokens < answer.report.output_tokens


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_aborted_answer_is_none(engine: BlendEngine, tmp_path: Path, reason: str) -> None:
    with saying(tmp_path, 200, event("She "), event("", reason), END) as (client, _):
        with pytest.raises(BackendError, match=reason):
            await answered(engine, client)
