"""Tools: what the model is shown, how it is made to call one, what LangChain is told of its calls."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, FunctionMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers.openai_tools import PydanticToolsParser
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError, PromptError, StructuredOutputError
from langchain_cacheblend import BlendLLM, ChatBlend
from langchain_cacheblend.forms import as_functions
from tests.families import tiny_reader
from tests.thinking import knows_tags


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


def test_a_template_without_tools_is_said_to_have_none(engine: BlendEngine, tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine)
    for ask in (llm.bind_tools, lambda tools: llm.with_structured_output(Age, method="function_calling")):
        with pytest.raises(ConfigError):
            ask([weather])
    with pytest.raises(PromptError):
        llm.invoke("What is it?", tools=[weather])
    assert llm.profile is not None and llm.profile["max_input_tokens"] == engine.window
    assert not llm.profile["tool_calling"] and llm.profile["structured_output"] and not llm.profile["image_inputs"]
    assert ChatBlend(engine=tool_engine).profile["tool_calling"]  # type: ignore[index]
    # Where there are tools, it must be one of them, and run here.
    llm = ChatBlend(engine=tool_engine)
    for tools, choice in (([weather], "time"), ([{"type": "web_search"}], None), ([{"type": "web_search"}], "any")):
        with pytest.raises(ConfigError):
            llm.bind_tools(tools, tool_choice=choice)
        with pytest.raises(ConfigError):
            llm.invoke("What is it?", tools=tools, tool_choice=choice)
    with pytest.raises(ConfigError):
        llm.invoke("Rain?", tool_choice="any")


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


ONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("says", "options", "text", "calls"),
    [
        (ONE, {}, "", 1),
        (f"I look.\n<tool_call>{ONE}</tool_call> ", {}, "I look.\n ", 1),
        (ONE, {"tool_choice": "none"}, ONE, 0),
        (ONE, {"tools": [Age]}, ONE, 0),
        (ONE, {"response_format": {"type": "json_object"}}, ONE, 0),
        (f"{ONE}; {ONE}", {"parallel_tool_calls": False}, "", 1),
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


OSLO = '{"city": "Oslo"}'
CALLED = {"name": "weather", "args": {"city": "Oslo"}, "id": "1", "type": "tool_call"}
RAW = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
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
    "OpenAI, chat": [AIMessage("I look.", additional_kwargs={"tool_calls": [RAW]}), RAIN, SO],
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
        RAIN,
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
    prompt = ChatBlend(engine=engine).blend_prompt([HumanMessage([block, "Where?"])])
    (chunk,) = (each for each in prompt.segments if isinstance(each, Chunk))
    assert chunk.text == source["data"]
    before, after = (str(each) for each in prompt.segments if each is not chunk)
    assert before.endswith("Mara\n") and "Where?" in after


async def test_a_call_that_max_tokens_cut_is_invalid_in_every_way_of_asking(tool_engine: BlendEngine) -> None:
    llm = ChatBlend(engine=tool_engine, temperature=0, max_tokens=3)
    bound, streamed = llm.bind_tools([weather], tool_choice="any"), None
    async for chunk in bound.astream("Will it rain?"):
        streamed = chunk if streamed is None else streamed + chunk
    for answer in (bound.invoke("Will it rain?"), streamed):
        assert (answer.content, answer.tool_calls) == ("", [])
        assert len(answer.invalid_tool_calls) == 1
        assert answer.response_metadata["finish_reason"] == "length"
    structured = llm.with_structured_output(Age, method="function_calling")
    for ask in (structured.invoke, lambda question: list(structured.stream(question))):
        with pytest.raises(StructuredOutputError, match="max_tokens") as raised:
            ask("Sure?")
        assert isinstance(raised.value, OutputParserException)


class Person(BaseModel):
    """Somebody."""

    age: int = Field(ge=0, le=150)
    tall: bool
    friends: list[Literal["Ann", "Bob"]] = Field(max_length=2)


class PersonDict(TypedDict):
    """Somebody."""

    tall: Annotated[bool, ..., "taller than two metres"]


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, max_tokens=160)


@pytest.mark.parametrize("temperature", [0, 2.0])
async def test_a_random_model_writes_what_the_schema_says(engine: BlendEngine, temperature: float) -> None:
    llm = ChatBlend(engine=engine, max_tokens=160, temperature=temperature)
    structured = llm.with_structured_output(Person)
    assert isinstance(structured.invoke("Who?"), Person)
    assert isinstance(await structured.ainvoke("Who?"), Person)
    assert all(isinstance(person, Person) for person in structured.stream("Who?"))
    part = {"type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]}
    joined = {"title": "T", "allOf": [{"$ref": "#/$defs/A"}, {"type": "object"}], "$defs": {"A": part}}
    for schema in (PersonDict, part | {"title": "T"}):
        assert llm.with_structured_output(schema).invoke("Who?").keys() == {"tall"}
    assert as_functions([joined])[0]["function"]["parameters"].keys() == {"allOf", "$defs"}
    ends: dict[Any, float] = {(engine.tokenizer("}", add_special_tokens=False)["input_ids"][0],): 100.0}
    answer = llm.bind(response_format={"type": "json_object"}, sequence_bias=ends, temperature=0).invoke("Who?")
    assert answer.text == "{}"


def test_raw_and_errors(llm: ChatBlend) -> None:
    both = llm.with_structured_output(Person, include_raw=True).invoke("Who?")
    assert isinstance(both["raw"], AIMessage)
    assert isinstance(both["parsed"], Person)
    assert both["parsing_error"] is None
    asked = llm.with_structured_output(Person, include_raw=True, max_tokens=3)
    streamed = [part for piece in asked.stream("Who?") for part in piece.items()]
    for short in (asked.invoke("Who?"), dict(streamed)):
        assert short["parsed"] is None
        assert isinstance(short["parsing_error"], StructuredOutputError)
    assert len([name for name, _ in streamed if name == "raw"]) > 1
    unknown = {"title": "T", "type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for schema, options in ((unknown, {}), (Person, {"method": "json"})):
        with pytest.raises(ConfigError):
            llm.with_structured_output(schema, **options)
    with pytest.raises(ConfigError):
        llm.invoke("Who?", response_format={"type": "xml"})
    endless = {"title": "T", "type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    with pytest.raises(StructuredOutputError):
        llm.with_structured_output(endless).invoke("Which?")
