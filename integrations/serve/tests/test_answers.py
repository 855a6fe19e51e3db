"""Answers over HTTP are the engine's, whole and in pieces, with what was asked of them."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import ValidationError

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.chat.catalog import catalog_of
from cacheblend_rag.chat.render import render_chat
from cacheblend_serve.wire import ChatRequest, CompletionRequest
from integrations.serve.tests.conftest import CHUNKS, Serve
from tests.thinking import TOOL_TEMPLATE, Dictation

PAGE = Path(__file__).resolve().parents[3] / "docs/serve.md"
QUESTION = [{"role": "user", "content": "Where was Mara born?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json={"messages": QUESTION, **GREEDY, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def events(client: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    with client.stream("POST", path, json={"stream": True, **body}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.strip(": ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def direct(engine: BlendEngine, *chunks: Chunk, tokens: int = 12) -> Any:
    """What the engine answers itself to the question with chunks before it."""
    content = [part for chunk in chunks for part in (chunk, "\n\n")] + [QUESTION[0]["content"]]
    parts = render_chat(engine.tokenizer, [{"role": "user", "content": content}])
    return engine.generate(catalog_of(engine).prompt(engine, parts), tokens, do_sample=False)


def test_an_answer_is_the_engines(engine: BlendEngine, serve: Serve) -> None:
    engine.add(Chunk(text, id) for id, text in CHUNKS.items())
    client = serve(engine)
    wanted = direct(engine, *(Chunk(text, id) for id, text in CHUNKS.items()))
    assert wanted.report.hits == 3
    by_id = ask(client, documents=list(CHUNKS))
    (choice,) = by_id["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    assert (choice["finish_reason"], by_id["object"]) == ("length", "chat.completion")
    cached = sum(chunk.tokens for chunk in wanted.report.chunks)
    tokens = wanted.report.prompt_tokens
    usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 12, "total_tokens": tokens + 12}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    assert by_id["usage"] == usage | {"completion_tokens_details": {"reasoning_tokens": 0}}
    # By their texts, in a message, or found where they stand in one: the same prompt.
    texts = "\n\n".join([*CHUNKS.values(), str(QUESTION[0]["content"])])
    inline = [part for id in CHUNKS for part in ({"type": "document", "id": id}, {"type": "text", "text": "\n\n"})]
    for body in (
        {"documents": [{"id": id, "text": text} for id, text in CHUNKS.items()]},
        {"messages": [{"role": "user", "content": texts}]},
        {"messages": [{"role": "user", "content": [*inline, {"type": "text", "text": QUESTION[0]["content"]}]}]},
    ):
        reply = ask(client, **body)
        assert reply["choices"][0]["message"]["content"] == wanted.text
        assert reply["usage"] == by_id["usage"]
    report = ask(client, documents=list(CHUNKS), report=True)["blend"][0]
    assert report["hits"] == 3 and [chunk["id"] for chunk in report["chunks"]] == list(CHUNKS)


def test_a_stream_has_the_same_answer(engine: BlendEngine, serve: Serve) -> None:
    engine.add(Chunk(text, id) for id, text in CHUNKS.items())
    client = serve(engine)
    body = {"messages": QUESTION, "documents": list(CHUNKS), **GREEDY}
    whole = ask(client, documents=list(CHUNKS))
    found = events(client, **body, stream_options={"include_usage": True})
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert len({event["id"] for event in found}) == 1
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[-1]["choices"] == [] and found[-1]["usage"] == whole["usage"]
    *pieces, end = (event["choices"][0] for event in found[:-1])
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["choices"][0]["message"]["content"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * len(pieces)
    assert (end["delta"], end["finish_reason"]) == ({}, "length")
    assert all(event["choices"] for event in events(client, **body))


def test_completions_of_one_prompt_and_several(engine: BlendEngine, serve: Serve) -> None:
    client = serve(engine)
    prompts = ["Where was Mara born?", "She works at the harbour."]
    wanted = [engine.generate(BlendPrompt(prompt), 8, do_sample=False).text for prompt in prompts]
    for prompt, texts in ((prompts[0], wanted[:1]), (prompts, wanted)):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
        reply = client.post("/v1/completions", json=body).json()
        assert reply["object"] == "text_completion"
        assert [choice["text"] for choice in reply["choices"]] == texts
        spoken = [""] * len(texts)
        for event in events(client, "/v1/completions", **body):
            (choice,) = event["choices"]
            spoken[choice["index"]] += choice["text"]
        assert spoken == texts
    # As evaluation harnesses send them.
    ids = [list(engine.prompt_ids(BlendPrompt(prompt))) for prompt in prompts]
    for given, texts in ((ids[0], wanted[:1]), (ids[:1], wanted[:1]), (ids, wanted)):
        harness = {"prompt": given, "temperature": 0, "max_tokens": 8, "stop": [], "seed": 1234, "echo": False}
        reply = client.post("/v1/completions", json=harness).json()
        assert [choice["text"] for choice in reply["choices"]] == texts
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids[: len(texts)]))
    engine.add([Chunk(CHUNKS["mara"], "mara")])
    named = client.post("/v1/completions", json={"prompt": "Where?", "documents": ["mara"], **GREEDY}).json()
    prompt = BlendPrompt(segments=[ChunkRef("mara"), "\n\n", "Where?"])
    assert named["choices"][0]["text"] == engine.generate(prompt, 12, do_sample=False).text


def test_stop_strings_and_lengths(serve: Serve) -> None:
    client = serve()
    text = ask(client, max_tokens=30)["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = ask(client, max_tokens=30, stop=[stop, "never said"])["choices"][0]
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"
    limited = serve(output_tokens=3)
    assert ask(limited, max_tokens=30)["usage"]["completion_tokens"] == 3
    assert ask(limited, max_tokens=None, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_how_tokens_are_drawn(engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(engine)

    def drawn(**body: Any) -> str:
        return str(
            ask(client, **{"temperature": 1.0, "seed": 0, "max_tokens": 16} | body)["choices"][0]["message"]["content"]
        )

    likeliest = drawn(temperature=0)
    assert drawn(temperature=1e-300, seed=None) == drawn(temperature=1e-300) == likeliest
    assert drawn(min_p=1.0) == drawn(min_p=1.0, seed=None) == drawn(top_p=1e-9) == likeliest
    assert drawn() == drawn(min_p=0, top_k=0, top_p=1, repetition_penalty=1) != likeliest
    # A seed repeats a draw in any company.
    prompt = engine.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    body = {"prompt": [prompt] * 3, "temperature": 1.0, "seed": 7, "max_tokens": 16}
    together = client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in together["choices"]] == [drawn(seed=7)] * 3
    assert len({drawn(seed=seed) for seed in range(4)}) == 4
    # What the model draws with where it is not said holds with a seed too.
    monkeypatch.setattr(engine.model.generation_config, "top_k", 1)
    assert drawn() == likeliest != drawn(top_k=0)


def test_variables_of_the_chat_template(engine: BlendEngine, serve: Serve) -> None:
    said = "{% generation %}{% endgeneration %}{% if enable_thinking is defined and not enable_thinking %}No thoughts.{% endif %}"
    engine.tokenizer.chat_template += said + "{{ reasoning_effort or '' }}"
    client = serve(engine)

    def ids(**body: Any) -> int:
        return int(ask(client, **body)["usage"]["prompt_tokens"])

    plain = ids()
    thinking, silent = (ids(chat_template_kwargs={"enable_thinking": each}) for each in (True, False))
    assert silent > thinking == plain
    assert ids(reasoning_effort="low") > plain > ids(add_generation_prompt=False)
    begun = [*QUESTION, {"role": "assistant", "content": "She was born in"}]
    prompt = engine.tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    wanted = engine.generate(BlendPrompt(prompt), 12, do_sample=False).text
    assert ask(client, messages=begun, continue_final_message=True)["choices"][0]["message"]["content"] == wanted


def test_messages_as_clients_keep_them(serve: Serve) -> None:
    client = serve()
    said = [*QUESTION, {"role": "assistant", "content": "In Oslo."}, *QUESTION]
    parts = [{"type": "text", "text": "In "}, {"type": "text", "text": "Oslo."}]
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    wanted = ask(client, messages=said)
    for answer in (
        {"content": "In Oslo.", "annotations": [], **nothing},
        {"content": parts, "name": "guide"},
        {"content": "In Oslo.", "type": "text"},
        {"content": None, "refusal": "In Oslo."},
    ):
        reply = ask(client, messages=[QUESTION[0] | {"name": "mara"}, {"role": "assistant", **answer}, *QUESTION])
        assert reply["choices"] == wanted["choices"]


def test_a_model_by_its_name(engine: BlendEngine, serve: Serve) -> None:
    engine.model_name = "harbour/tiny-0.1"
    client = serve(engine)
    [model] = client.get("/v1/models").json()["data"]
    for name in ("harbour/tiny-0.1", "harbour%2Ftiny-0.1"):
        assert client.get(f"/v1/models/{name}").json() == model
    assert client.get("/v1/models/harbour").status_code == 404


ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (chats|completions|both) \| (?:only `(.+)`)?", re.MULTILINE)


def test_the_guide_has_every_field() -> None:
    told: dict[str, set[str]] = {"chats": set(), "completions": set(), "both": set()}
    for names, where, only in ROW.findall(PAGE.read_text(encoding="utf-8")):
        fields = re.findall(r"\w+", names)
        told[where] |= set(fields)
        for field in fields if only else ():
            kind = CompletionRequest if where == "completions" else ChatRequest
            least = {"prompt": "x"} if where == "completions" else {"messages": QUESTION}
            assert kind.model_validate(least | {field: json.loads(only)}), field
            with pytest.raises(ValidationError) as refused:
                kind.model_validate(least | {field: "another"})
            assert field in str(refused.value.errors())
    chat, completion = ({*kind.model_fields, *kind.usual} for kind in (ChatRequest, CompletionRequest))
    assert (told["chats"] | told["both"], told["completions"] | told["both"]) == (chat, completion)
    # OpenAI's own that are not there are refused.
    assert set(CompletionCreateParamsBase.__annotations__) - completion == {"logprobs"}


def test_an_answer_may_go_on_after_its_end(engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(engine)
    token = engine.tokenizer.encode(ask(client, max_tokens=1)["choices"][0]["message"]["content"])[0]
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", token)
    assert ask(client, max_tokens=20)["choices"][0]["finish_reason"] == "stop"
    on = ask(client, max_tokens=20, ignore_eos=True)
    assert (on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]) == (20, "length")
    form = {"messages": QUESTION, "ignore_eos": True, "response_format": {"type": "json_object"}}
    refused = client.post("/v1/chat/completions", json=form)
    assert refused.status_code == 400


def test_answers_of_a_schema_and_calls_of_tools(engine: BlendEngine, serve: Serve) -> None:
    engine.tokenizer.chat_template = TOOL_TEMPLATE
    client = serve(engine)
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    }
    asked = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    said = json.loads(ask(client, response_format=asked, max_tokens=60)["choices"][0]["message"]["content"])
    assert said["city"] in ("Oslo", "Rome") and 1 <= said["days"] <= 9
    parameters = {"$ref": "#/$defs/Trip", "$defs": {"Trip": schema}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Say it.", "parameters": parameters}}
    body = {"tools": [tool], "tool_choice": "required", "max_tokens": 80}
    (choice,) = ask(client, **body)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    streamed = [event["choices"][0] for event in events(client, messages=QUESTION, temperature=0, **body)]
    (spoken,) = [each for choice in streamed for each in choice["delta"].get("tool_calls", [])]
    assert spoken["function"] == call["function"]
    assert streamed[-1]["finish_reason"] == "tool_calls"
    # The call and its result are shown to the model.
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": call["id"], "content": "rain"})
    more = ask(client, messages=turns, tools=[tool])
    assert more["usage"]["prompt_tokens"] > ask(client, tools=[tool])["usage"]["prompt_tokens"]
    assert ask(client, tools=[tool], tool_choice="none")["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_get_its_form_is_an_error_with_a_name(
    engine: BlendEngine, serve: Serve, stream: bool
) -> None:
    engine.tokenizer.chat_template = TOOL_TEMPLATE
    client = serve(engine)

    def asked(value: dict[str, Any], **more: Any) -> httpx.Response:
        schema = {"type": "object", "properties": {"v": value}, "required": ["v"]}
        tool = {"type": "function", "function": {"name": "v", "parameters": schema}}
        body = {"messages": QUESTION, "temperature": 0, "stream": stream, "tools": [tool], "tool_choice": "required"}
        return client.post("/v1/chat/completions", json=body | more)

    # Nothing is of that form.
    assert asked({"type": "integer", "minimum": 2, "maximum": 1}).json()["error"]["code"] == "invalid_option"
    # A stream that has begun ends with it.
    cut = asked({"type": "boolean"}, stop="name")
    assert cut.status_code == (200 if stream else 422) and "unfinished_answer" in cut.text
    # What max_tokens cuts says so, as OpenAI's does.
    assert '"finish_reason":"length"' in asked({"type": "boolean"}, max_tokens=4).text.replace(" ", "")


ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("says", "body", "text", "calls"),
    [
        (f"I look.\n<tool_call>{ONE}</tool_call> ", {}, "I look.\n ", 1),
        (ONE, {"tool_choice": "none"}, ONE, 0),
        (ONE, {"tools": []}, ONE, 0),
        (ONE, {"response_format": {"type": "json_object"}}, ONE, 0),
        (f"{ONE}; {ONE}", {"parallel_tool_calls": False}, None, 1),
    ],
)
def test_an_answer_is_read_as_the_request_allows(
    serve: Serve, says: str, body: dict[str, Any], text: str | None, calls: int
) -> None:
    dictation = Dictation("Qwen3")
    dictation.tokenizer.chat_template = TOOL_TEMPLATE
    with dictation.engine as engine:
        client, size = serve(engine), dictation.say(says)
        body = {"tools": [{"type": "function", "function": {"name": "weather"}}], "max_tokens": size} | body
        message = ask(client, **body)["choices"][0]["message"]
        dictation.say(says)
        deltas = [event["choices"][0]["delta"] for event in events(client, messages=QUESTION, temperature=0, **body)]
    assert (message["content"], len(message.get("tool_calls", []))) == (text, calls)
    assert "".join(delta.get("content") or "" for delta in deltas) == (text or "")
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) == calls
