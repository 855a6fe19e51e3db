"""Tools: what the model is shown, how it is made to call one, what LangChain is told of its calls."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, FunctionMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers.openai_tools import PydanticToolsParser
from langchain_core.tools import create_retriever_tool, tool
from pydantic import BaseModel, Field

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError, PromptError, StructuredOutputError
from integrations.langchain.tests.asking import chunk_ids, knows_tags
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend
from langchain_cacheblend.forms import AnswerForm, as_functions
from tests.families import tiny_reader


@pytest.fixture
def tool_engine(tokenizer: Any) -> Iterator[BlendEngine]:
    shows = knows_tags(tokenizer)
    with BlendEngine(tiny_reader(vocab_size=len(shows)), shows, **engine_settings(self_check=False)) as engine:
        yield engine


@tool
def weather(city: str, days: int = 1) -> str:
    """Say what the weather will be."""
    return f"{city}: rain for {days} days"


class Age(BaseModel):
    """The age of a person."""

    sure: bool


def test_a_template_without_tools_is_said_to_have_none(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine)
    with pytest.raises(ConfigError, match="no tools"):
        llm.bind_tools([weather])
    with pytest.raises(ConfigError, match="no tools"):
        llm.with_structured_output(Age, method="function_calling")
    with pytest.raises(PromptError, match="no place for tools"):
        llm.invoke("What is it?", tools=[weather])
    assert llm._resolve_model_profile()["tool_calling"] is False


def test_the_model_is_shown_the_tools_their_calls_and_results(tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=tool_engine)
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "1"}
    messages = [HumanMessage("And Oslo?"), AIMessage("", tool_calls=[call]), ToolMessage("rain", tool_call_id="1")]
    text = tool_engine.tokenizer.decode(tool_engine.prompt_ids(llm.blend_prompt(messages, tools=[weather])))
    assert '"description": "Say what the weather will be."' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert llm.get_num_tokens_from_messages(messages, tools=[weather]) == len(
        tool_engine.prompt_ids(llm.blend_prompt(messages, tools=[weather]))
    )
    none = llm.bind_tools([weather], tool_choice="none").invoke(messages, max_tokens=1)
    assert none.usage_metadata["input_tokens"] == len(tool_engine.prompt_ids(llm.blend_prompt(messages)))


async def test_a_call_that_has_to_be_made_fits_the_tool(tool_engine: BlendEngine) -> None:
    # The bias ends what a random model would go on with for ever.
    bias = {tuple(tool_engine.tokenizer(sign, add_special_tokens=False)["input_ids"]): 50.0 for sign in ('"', "}")}
    llm = ChatBlend(engine=tool_engine, max_tokens=120, generation_kwargs={"sequence_bias": bias})
    for choice in ("any", "weather", {"type": "function", "function": {"name": "weather"}}, True):
        bound = llm.bind_tools([weather] if choice == "any" else [Age, weather], tool_choice=choice)
        answer = bound.invoke("Rain?")
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert answer.content == ""
        (call,) = answer.tool_calls
        if choice is not True:
            assert call["name"] == "weather"
            assert isinstance(weather.invoke(call["args"]), str)
        pieces = list(bound.stream("Rain?"))
        whole = sum(pieces[1:], start=pieces[0])
        assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]
        assert whole.content == ""
        again = await bound.ainvoke("Rain?")
        assert [(c["name"], c["args"]) for c in again.tool_calls] == [(call["name"], call["args"])]
    for schema in (Age, Age.model_json_schema()):
        structured = llm.with_structured_output(schema, method="function_calling")
        assert isinstance(structured.invoke("Sure?"), Age if schema is Age else dict)
        both = [*llm.with_structured_output(schema, method="function_calling", include_raw=True).stream("Sure?")]
        assert {name: value for each in both for name, value in each.items()}["parsed"] == structured.invoke("Sure?")
    assert isinstance((llm.bind_tools([Age], tool_choice="any") | PydanticToolsParser(tools=[Age])).invoke("?")[0], Age)
    with pytest.raises(ConfigError, match="none of the tools weather"):
        llm.bind_tools([weather], tool_choice="time")


def test_without_having_to_the_answer_is_text(tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=tool_engine, max_tokens=12)
    bound = llm.bind_tools([weather])
    answer = bound.invoke("Rain?")
    assert answer.content
    assert not answer.tool_calls
    assert "".join(piece.text for piece in bound.stream("Rain?")) == answer.content


ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("says", "options", "text", "calls"),
    [
        (ONE, {}, "", 1),
        (f"I look.\n<tool_call>{ONE}</tool_call> ", {}, "I look.\n ", 1),
        (ONE, {"tool_choice": "none"}, ONE, 0),
        (ONE.replace("weather", "gcc"), {}, ONE.replace("weather", "gcc"), 0),
        (ONE, {"tools": [Age]}, ONE, 0),
        (ONE, {"tools": []}, ONE, 0),
        (ONE, {"response_format": {"type": "json_object"}}, ONE, 0),
        (ONE, {"response_format": {"type": "text"}}, "", 1),
        (f"```json\n{ONE}\n```", {}, "", 1),
        (f"{ONE}; {ONE}", {}, "", 2),
        (f"{ONE}; {ONE}", {"parallel_tool_calls": False}, f"; {ONE}", 1),
    ],
)
async def test_an_answer_is_read_as_the_request_allows(
    tool_engine: BlendEngine, says: str, options: dict[str, Any], text: str, calls: int
) -> None:
    ids = tool_engine.tokenizer(says, add_special_tokens=False)["input_ids"]
    begun: list[int] = []

    def write(_: int, seen: Any) -> list[int]:
        begun.append(len(seen))
        return [ids[min(len(seen) - begun[0], len(ids) - 1)]]

    llm = ChatBlend(engine=tool_engine, max_tokens=len(ids), generation_kwargs={"prefix_allowed_tokens_fn": write})
    bound = llm.bind(**({"tools": [weather]} | options))
    answer = bound.invoke("Rain?")
    begun.clear()
    streamed = None
    async for piece in bound.astream("Rain?"):
        streamed = piece if streamed is None else streamed + piece
    for said in (answer, streamed):
        assert (said.content, len(said.tool_calls), said.invalid_tool_calls) == (text, calls, [])


def test_a_call_without_tools_cannot_be_asked_for(tool_engine: BlendEngine) -> None:
    with pytest.raises(ConfigError, match="there are no tools"):
        ChatBlend(engine=tool_engine).invoke("Rain?", tool_choice="any")


def raw_call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


OSLO = '{"city": "Oslo"}'
CALLED = {"name": "weather", "args": {"city": "Oslo"}, "id": "1", "type": "tool_call"}
RAIN, SO = ToolMessage("rain", tool_call_id="1"), HumanMessage("So?")
# The same conversation, as the classes for several providers write it.
HISTORIES: dict[str, list[Any]] = {
    "LangChain": [AIMessage("I look.", tool_calls=[CALLED]), RAIN, SO],
    "LangChain's blocks": [AIMessage(content_blocks=[{"type": "text", "text": "I look."}, CALLED]), RAIN, SO],
    "Anthropic": [
        AIMessage(
            [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look.", "citations": []},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}},
            ]
        ),
        HumanMessage(
            [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]}, "So?"]
        ),
    ],
    "OpenAI, chat": [AIMessage("I look.", additional_kwargs={"tool_calls": [raw_call(OSLO)]}), RAIN, SO],
    "OpenAI, functions": [
        AIMessage("I look.", additional_kwargs={"function_call": {"name": "weather", "arguments": OSLO}}),
        FunctionMessage("rain", name="weather"),
        SO,
    ],
    "OpenAI, responses": [
        AIMessage(
            [
                {"type": "reasoning", "summary": []},
                {"type": "output_text", "text": "I look.", "annotations": []},
                {"type": "function_call", "name": "weather", "arguments": OSLO, "call_id": "1"},
            ],
            tool_calls=[CALLED],
        ),
        HumanMessage([{"type": "function_call_output", "call_id": "1", "output": "rain"}]),
        HumanMessage([{"type": "input_text", "text": "So?"}]),
    ],
    "Google": [AIMessage(["I look."], tool_calls=[CALLED]), RAIN, HumanMessage([{"text": "So?"}])],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_of_other_classes_are_read(tool_engine: BlendEngine, name: str) -> None:
    def shown(llm: Any, messages: list[Any]) -> str:
        prompt = llm.blend_prompt([HumanMessage("And Oslo?"), *messages])
        return "".join(part if isinstance(part, str) else part.text for part in prompt.segments)

    assert shown(ChatBlend(engine=tool_engine), HISTORIES[name]) == shown(
        ChatBlend(engine=tool_engine), HISTORIES["LangChain"]
    )
    text = shown(BlendLLM(engine=tool_engine), HISTORIES[name])
    assert all(each in text for each in ("And Oslo?", "I look.", "weather", "Oslo", "rain", "So?"))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), (" ", "{}"), ("null", "{}"), (OSLO, OSLO), ("Oslo", '"Oslo"'), ('{"a', '"{\\"a"')],
)
def test_past_calls_may_have_any_arguments(tool_engine: BlendEngine, arguments: str, shown: str) -> None:
    answer = AIMessage("", additional_kwargs={"tool_calls": [raw_call(arguments)]})
    [*_, last] = ChatBlend(engine=tool_engine).blend_prompt([HumanMessage("And Oslo?"), answer, RAIN]).segments
    assert f'{{"name": "weather", "arguments": {shown}}}' in str(last)


def test_what_was_no_call_and_refusals_are_words(tool_engine: BlendEngine) -> None:
    cut = {"type": "invalid_tool_call", "name": None, "args": "{'city", "id": "1", "error": "It was cut off."}
    for answer in (
        AIMessage("", invalid_tool_calls=[cut]),
        AIMessage("", additional_kwargs={"refusal": "{'city"}),
        AIMessage([{"type": "refusal", "refusal": "{'city"}]),
    ):
        assert "<|assistant|>\n{'city" in str(ChatBlend(engine=tool_engine).blend_prompt([SO, answer, SO]).segments[-1])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "http://somewhere/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]},
        {"type": "tool_use", "id": "1", "input": {}},
    ],
)
def test_what_has_no_equivalent_is_refused_by_its_name(engine: BlendEngine, block: dict[str, Any]) -> None:
    message = AIMessage([block]) if block["type"].endswith("use") else HumanMessage([block])
    said = r"a content block of type '(image|input_audio|document|server)|call without a name"
    with pytest.raises(PromptError, match=said):
        ChatBlend(engine=engine).blend_prompt([message])


def test_documents_in_anthropics_form_are_chunks(engine: BlendEngine) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Mara Lind was born in Oslo."}
    block = {"type": "document", "title": "Mara", "source": source}
    text = [{"type": "text", "text": "A baker."}]
    found = {"type": "search_result", "source": "x", "title": "Works", "content": text}
    prompt = ChatBlend(engine=engine).blend_prompt([HumanMessage([block, found, "Where?"])])
    (chunk,) = (each for each in prompt.segments if isinstance(each, Chunk))
    assert chunk.text == source["data"]
    before, after = (str(each) for each in prompt.segments if each is not chunk)
    assert before.endswith("Mara\n") and "Works\nA baker." in after


def test_what_a_tool_retrieved_is_blended(tool_engine: BlendEngine, embedding: Any, chunks: dict[str, str]) -> None:
    from langchain_core.vectorstores import InMemoryVectorStore

    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=tool_engine)
    store.add_documents([Document(text, id=id) for id, text in chunks.items()])
    llm = ChatBlend(engine=tool_engine, max_tokens=4, min_chunk_chars=10_000)
    retrieve = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 3}), "search", "Look it up.", response_format="content_and_artifact"
    )
    call = {"name": "search", "args": {"query": "goat"}, "id": "c1", "type": "tool_call"}
    result = retrieve.invoke(call)
    messages = [HumanMessage("Who?"), AIMessage("", tool_calls=[call]), result]
    # Found by the artifact: nothing is looked for in the text here.
    assert chunk_ids(llm.blend_prompt(messages)) == [document.id for document in result.artifact]
    assert llm.invoke(messages).response_metadata["blend"]["hits"] == 3
    # Without the artifact, and with one that is not in the text, there is only text.
    for artifact in (None, [Document("Something else altogether.", id="x")]):
        plain = ToolMessage(result.content, tool_call_id="c1", artifact=artifact)
        assert chunk_ids(llm.blend_prompt([*messages[:2], plain])) == []


async def test_a_call_that_max_tokens_cut_is_invalid_in_every_way_of_asking(tool_engine: BlendEngine) -> None:
    for tokens in (1, 3, 8):
        llm = ChatBlend(engine=tool_engine, temperature=0, max_tokens=tokens).bind_tools([weather], tool_choice="any")
        streamed = None
        async for chunk in llm.astream("Will it rain?"):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None
        for answer in (llm.invoke("Will it rain?"), streamed):
            assert (answer.content, answer.tool_calls) == ("", [])
            assert len(answer.invalid_tool_calls) == 1
            assert answer.response_metadata["finish_reason"] == "length"
        assert "raise max_tokens" in str(llm.invoke("Will it rain?").invalid_tool_calls[0]["error"])
        asked = ChatBlend(engine=tool_engine, temperature=0, max_tokens=tokens)
        structured = asked.with_structured_output(Age, method="function_calling")
        with pytest.raises(StructuredOutputError, match="raise max_tokens") as raised:
            structured.invoke("Sure?")
        assert isinstance(raised.value, OutputParserException)
        with pytest.raises(OutputParserException, match="raise max_tokens"):
            list(structured.stream("Sure?"))


class Node(BaseModel):
    """One of a list that has no end."""

    next: "Node"


async def test_a_form_that_nothing_has_is_an_error_with_a_name(tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=tool_engine, temperature=0, max_tokens=60)
    with pytest.raises(ConfigError, match="without an end"):
        llm.with_structured_output(Node)
    endless = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    own = {"type": "function", "function": {"name": "Node", "parameters": endless}}
    with pytest.raises(ConfigError, match="without an end"):
        llm.bind_tools([own], tool_choice="any").invoke("Which?")
    # LangChain makes a tool of it that takes anything.
    with pytest.raises(StructuredOutputError):
        llm.with_structured_output(Node, method="function_calling").invoke("Which?")
    # Each part of it has an end, both together have none.
    stuck = {"title": "T", "allOf": [{"type": "object"}, {"properties": {"v": {"$ref": "#"}}, "required": ["v"]}]}
    for method in ("json_schema", "function_calling"):
        runnable = llm.with_structured_output(stuck, method=method)
        with pytest.raises(StructuredOutputError, match="no text can go on"):
            runnable.invoke("Which?")
        with pytest.raises(StructuredOutputError, match="no text can go on"):
            [each async for each in runnable.astream("Which?")]


def test_a_tool_that_providers_run_is_refused(tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=tool_engine)
    for choice in (None, "any", "web_search"):
        with pytest.raises(ConfigError, match=r"web_search.* is not a function"):
            llm.bind_tools([{"type": "web_search"}], tool_choice=choice)
        with pytest.raises(ConfigError, match=r"web_search.* is not a function"):
            llm.invoke("What is new?", tools=[weather, {"type": "web_search"}], tool_choice=choice)


class Place(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["town", "farm"]


class Person(BaseModel):
    """Somebody."""

    age: int = Field(ge=0, le=150)
    tall: bool
    home: Place | None
    friends: list[Literal["Ann", "Bob"]] = Field(max_length=2)


class PersonDict(TypedDict):
    """Somebody."""

    tall: Annotated[bool, ..., "taller than two metres"]


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, max_tokens=160)


@pytest.mark.parametrize("temperature", [0, 2.0])
async def test_a_random_model_writes_what_the_schema_says(llm: ChatBlend, temperature: float) -> None:
    structured = llm.with_structured_output(Person, include_raw=False).with_config(tags=["x"])
    bound = ChatBlend(engine=llm.engine, max_tokens=160, temperature=temperature).with_structured_output(Person)
    for runnable in (structured, bound):
        assert isinstance(runnable.invoke("Who?"), Person)
        assert isinstance(await runnable.ainvoke("Who?"), Person)
        assert all(isinstance(person, Person) for person in runnable.stream("Who?"))
    for schema in (
        PersonDict,
        {"title": "T", "type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]},
    ):
        value = llm.with_structured_output(schema).invoke("Who?")
        assert list(value) == ["tall"]
        assert isinstance(value["tall"], bool)
    parts = [{"type": "object", "properties": {n: {"type": "boolean"}}, "required": [n]} for n in ("tall", "old")]
    joined = {"title": "T", "allOf": [{"$ref": "#/$defs/A"}, parts[1]], "$defs": {"A": parts[0]}}
    assert llm.with_structured_output(joined).invoke("Who?").keys() == {"tall", "old"}
    assert as_functions([joined])[0]["function"]["parameters"].keys() == {"allOf", "$defs"}


def test_the_model_is_told_the_schema(llm: ChatBlend) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    call = llm._prepared(llm._convert_input("Who?").to_messages(), None, {"response_format": form})
    text = llm.engine.tokenizer.decode(llm.engine.prompt_ids(call.prompt))
    assert "Who?\n\nAnswer with JSON of this schema" in text
    assert '"Somebody."' in text


def test_raw_and_errors(llm: ChatBlend) -> None:
    both = llm.with_structured_output(Person, include_raw=True).invoke("Who?")
    assert isinstance(both["raw"], AIMessage)
    assert isinstance(both["parsed"], Person)
    assert both["parsing_error"] is None
    short = llm.with_structured_output(Person, include_raw=True, max_tokens=3).invoke("Who?")
    assert short["parsed"] is None
    assert "raise max_tokens" in str(short["parsing_error"])
    with pytest.raises(OutputParserException, match="not JSON of the form"):
        llm.with_structured_output(Person, max_tokens=3).invoke("Who?")
    with pytest.raises(ConfigError, match="cannot be enforced"):
        llm.with_structured_output({"title": "T", "type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    for method in ("json", None):
        with pytest.raises(ConfigError, match="not known"):
            llm.with_structured_output(Person, method=method)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="response_format"):
        llm.invoke("Who?", response_format={"type": "xml"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [("Ann.", "Expecting value"), ("[true]", "not an object"), ("{}", "tall missing"), ('{"tall":', "Expecting value")],
)
def test_text_that_is_no_such_json(text: str, problem: str) -> None:
    with pytest.raises(OutputParserException, match=problem):
        AnswerForm(PersonDict).parse(AIMessage(text))


def test_json_in_a_fence_is_json() -> None:
    assert AnswerForm(PersonDict).parse(AIMessage('```json\n{"tall": true}\n```')) == {"tall": True}


def test_json_mode_is_any_object(llm: ChatBlend) -> None:
    ends: dict[Any, float] = {(llm.engine.tokenizer("}", add_special_tokens=False)["input_ids"][0],): 100.0}
    answer = llm.bind(response_format={"type": "json_object"}, sequence_bias=ends).invoke("Who?")
    assert answer.text == "{}"


async def test_a_batch_of_forms_is_answered_as_one_by_one(llm: ChatBlend) -> None:
    structured = llm.with_structured_output(Person)
    questions = ["Who?", "Who lives in the tower by the sea?", "Where?"]
    wanted = [structured.invoke(question) for question in questions]
    assert structured.batch(questions) == wanted
    assert await structured.abatch(questions) == wanted
