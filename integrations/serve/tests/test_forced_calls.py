"""Forced calls of tools by real models: LangChain's, and those of OpenAI's client to a server, whole and in streams.

``TOOL_MODELS="folder file.gguf" pytest integrations/serve/tests/test_forced_calls.py -s`` says how many are well-formed.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from langchain_core.documents import Document

from cacheblend_rag import BlendEngine
from cacheblend_rag.engine import Engine
from integrations.serve.tests.conftest import serving
from langchain_cacheblend import ChatBlend

pytestmark = [pytest.mark.full, pytest.mark.timeout(7200)]

MODELS = os.environ.get("TOOL_MODELS", "").split()


def tool(name: str, says: str, required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required or [*properties]}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
# Tools, and what is asked of each.
ASKED = [
    (tool("get_weather", "Say the weather of a city.", city=TEXT, days={"type": "integer", "minimum": 1, "maximum": 9}),
     "What will the weather be in Oslo for the next three days?"),
    (tool("convert", "Convert an amount between currencies.", amount={"type": "number", "exclusiveMinimum": 0},
          source={"enum": ["EUR", "USD", "NOK"]}, target={"enum": ["EUR", "USD", "NOK"]}),
     "How much is 12.50 euros in Norwegian crowns?"),
    (tool("book_table", "Book a table.", ["guest", "seats"],
          guest={"type": "object", "properties": {"name": TEXT, "phone": {"anyOf": [TEXT, {"type": "null"}]}},
                 "required": ["name", "phone"]},
          seats={"type": "integer", "minimum": 1}, outside=FLAG),
     "A table for four, outside please, for Mara Lind."),
    (tool("send_mail", "Send an e-mail.", to={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
          subject={"type": "string", "maxLength": 60}, urgent=FLAG),
     "Tell ann@example.org and bob@example.org that the meeting is at noon. It is urgent."),
    (tool("søk", "Søk i dokumentene.", spørring=TEXT, treff={"type": "integer", "minimum": 1, "maximum": 20}),
     "Finn fem dokumenter om fergen til Lund."),
    (tool("set_alarm", "Set an alarm.", ["time"], time={"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
          days={"type": "array", "items": {"enum": ["Mo", "Tu", "We", "Th", "Fr", "Sa", "Su"]}, "maxItems": 7}),
     "Wake me at half past six on Monday and Friday."),
    (tool("run_sql", "Run a query on the table orders(id, customer, total, day).", query=TEXT),
     "What did the customer \"O'Hara\" spend in total in 2024?"),
    (tool("list_files", "List the files of the current folder."), "Which files are there?"),
]  # fmt: skip
TOOLS = [each for each, _ in ASKED]
PAGE = Document("The harbour office of Lund opens at seven in the morning and closes when the last ferry has left.")


def problem(name: str, arguments: Any, tools: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with a call, if anything is."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    if name not in schemas:
        return f"{name!r} is none of the tools"
    return next((error.message for error in Draft202012Validator(schemas[name]).iter_errors(arguments)), None)


@pytest.fixture(scope="module", params=MODELS or [None], ids=lambda path: os.path.basename(path or "none"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param is None:
        pytest.skip("TOOL_MODELS names no models")
    with BlendEngine.from_pretrained(request.param) as engine:
        yield engine


def count(ask: Callable[[int], tuple[list[tuple[str, Any]], list[dict[str, Any]]]], number: int, model: str) -> None:
    """Ask so many times, four at once, and say which calls are wrong; `ask` returns calls and the tools that there were."""
    wrong = []
    with ThreadPoolExecutor(4) as pool:
        for place, (calls, tools) in enumerate(pool.map(ask, range(number))):
            found = [problem(*call, tools) for call in calls] or ["no call"]
            print(place, calls, *filter(None, found), flush=True)
            wrong += [place] if any(found) else []
    print(f"{model}: {number - len(wrong)} of {number}")
    assert not wrong


def test_forty_of_langchain(engine: Engine) -> None:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=200)

    def ask(number: int) -> tuple[list[tuple[str, Any]], list[dict[str, Any]]]:
        (own, question), way = ASKED[number % len(ASKED)], number // len(ASKED)
        others = [each for each in TOOLS[number % 3 : number % 3 + 2] if each is not own]
        tools, name = [[own], [*others, own], [own, *others], [own], [*others, own]][way], own["function"]["name"]
        if way == 3:
            return [(name, llm.with_structured_output(own, method="function_calling").invoke(question))], tools
        bound = llm.bind_tools(tools, tool_choice=name if way == 1 else "any")
        answer: Any
        if way in (1, 2):
            pieces = [*bound.stream(question)]
            answer = sum(pieces[1:], start=pieces[0])
        else:
            answer = bound.invoke(question, documents=[PAGE] if way == 4 else [])
        return [(call["name"], call["args"]) for call in answer.tool_calls], tools

    count(ask, 40, engine.model_name)


def test_twenty_of_openais_client(engine: Engine) -> None:
    def ask(number: int) -> tuple[list[tuple[str, Any]], list[dict[str, Any]]]:
        own, question = ASKED[number % len(ASKED)]
        tools: Any = [own, *TOOLS[:2]] if number % 8 > 1 else [own]
        choice: Any = own | {"function": {"name": own["function"]["name"]}} if number % 3 == 1 else "required"
        asked: dict[str, Any] = {"tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 200}
        asked |= {"model": engine.model_name, "messages": [{"role": "user", "content": question}]}
        if number % 2:
            with client.chat.completions.stream(**asked) as stream:
                said = stream.get_final_completion().choices[0]
        else:
            said = client.chat.completions.create(**asked).choices[0]
        calls = [call.function for call in said.message.tool_calls or []]
        return [(call.name, json.loads(call.arguments)) for call in calls], tools

    with (
        serving(engine, timeout_s=3000) as address,  # type: ignore[arg-type]
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=3000) as client,
    ):
        count(ask, 20, engine.model_name)
