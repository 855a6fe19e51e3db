"""Templates as schemas: a prompt says what the template says with the same values."""

from itertools import product
from typing import Annotated, Any

import pytest
from jinja2 import Environment
from langchain_core.messages import SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate as LlamaIndexChat
from llama_index.core.prompts import PromptTemplate as LlamaIndexTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from cacheblend_pml import MaxTokens, Prompt, Schema, SchemaLayout, Tokens, lay_out
from cacheblend_pml.chat import Message
from cacheblend_rag.errors import PMLError
from integrations.pml.tests.naive import tokenize


def chat(messages: list[Message]) -> str:
    return "".join(f"[{each['role']}]{each['content']}" for each in messages) + "[assistant]"


def said(prompt: Prompt) -> str:
    layout = SchemaLayout(prompt.schema, Tokens(tokenize, 0, (), "", chat))
    return "".join(map(chr, lay_out(layout, prompt).token_ids))


def greeting(who: str, loud: bool) -> Any:
    yield f"Hello {who}"
    if loud:
        yield "!"


def trip(
    duration: Annotated[str, MaxTokens(8)],
    city: Annotated[str, MaxTokens(6)] = "Rome",
    style: str = "calm",
    budget: bool = False,
) -> Any:
    """Say nothing of this."""
    yield from greeting(city, budget)
    yield f" I am away for {duration}" + ", " + city
    if style == "calm":
        yield " and want rest."
    elif style == "busy":
        yield f" and want to see all of {city}."
    else:
        pass
    if not budget:
        yield " Money is no matter."
    match style:
        case "calm":
            yield " Slowly."
        case _:
            yield " Now."


def test_a_function_says_the_same_as_a_schema() -> None:
    schema = Schema.from_template(trip)
    names = "trip greeting budget style-calm style-busy not-budget style-calm-2 no-style-calm"
    assert " ".join(schema.modules) == names
    assert schema.unions == (("style-calm", "style-busy"), ("style-calm-2", "no-style-calm"))
    assert schema.parents["style-busy"] == "trip"
    for style, budget in product(["calm", "busy", "odd"], [True, False]):
        expected = "".join(trip("a week", "Oslo", style, budget))
        assert said(schema.fill({"duration": "a week", "city": "Oslo", "style": style, "budget": budget})) == expected
    assert said(schema.fill({"duration": "3 days"}, " Go!")) == "".join(trip("3 days")) + " Go!"


def returned(topic: Annotated[str, MaxTokens(9)]) -> str:
    return f"Tell me about {topic}."


def test_a_function_may_return_its_text() -> None:
    assert said(Schema.from_template(returned).fill({"topic": "goats"})) == "Tell me about goats."


JINJA = """Plan {{ days }} days.
{% if surf %}Surf {{ place }} first.
{% elif not swim %}Stay dry.{% else %}Swim.{% endif %}
{% if style == "calm" %}Slowly.{% endif %} {{ place }}
"""


@pytest.mark.parametrize("surf", [True, False])
@pytest.mark.parametrize("swim", [True, False])
@pytest.mark.parametrize("style", ["calm", "busy"])
def test_a_jinja_template_says_the_same_as_a_schema(surf: bool, swim: bool, style: str) -> None:
    schema = Schema.from_template(JINJA, name="plan", lengths={"days": 3, "place": 8}, format="jinja")
    values = {"days": 3, "place": "here", "surf": surf, "swim": swim, "style": style}
    rendered = Environment(keep_trailing_newline=True).from_string(JINJA).render(**values)
    assert said(schema.fill(values)) == rendered


def test_a_format_string_says_the_same_as_a_schema() -> None:
    schema = Schema.from_template("{a} and {{b}} {a}", name="s", lengths={"a": 5}, format="f-string")
    assert said(schema.fill({"a": "x y"})) == "{a} and {{b}} {a}".format(a="x y")


def test_templates_of_langchain() -> None:
    text = PromptTemplate.from_template("Say {word} to {name}.").partial(word="hi")
    assert said(Schema.from_template(text, name="s", lengths={"name": 5}).fill({"name": "Mara"})) == "Say hi to Mara."
    messages = ChatPromptTemplate.from_messages(
        [SystemMessage("Be {brief}."), ("human", "What is {thing}?"), ("ai", "This."), ("human", "And {thing}?")]
    )
    schema = Schema.from_template(messages, name="s", lengths={"thing": 7})
    assert list(schema.modules) == ["s-system", "s-user", "s-assistant", "s-user-2"]
    expected = chat([{"role": {"human": "user", "ai": "assistant"}.get(each.type, each.type), "content": str(each.content)}
                     for each in messages.format_messages(thing="a goat")])  # fmt: skip
    assert said(schema.fill({"thing": "a goat"})) == expected


def test_templates_of_llama_index() -> None:
    text = LlamaIndexTemplate('Say {word} to {name}: {"json": 1}').partial_format(word="hi")
    schema = Schema.from_template(text, name="s", lengths={"name": 5})
    assert said(schema.fill({"name": "Mara"})) == text.format(name="Mara") == 'Say hi to Mara: {"json": 1}'
    messages = LlamaIndexChat([ChatMessage("Be brief.", role="system"), ChatMessage("What is {thing}?", role="user")])
    expected = chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a goat?"}])
    assert said(Schema.from_template(messages, name="s", lengths={"thing": 7}).fill({"thing": "a goat"})) == expected


def test_a_prompt_selector_gives_its_default_template() -> None:
    schema = Schema.from_template(DEFAULT_TEXT_QA_PROMPT_SEL, name="qa", lengths={"context_str": 200, "query_str": 40})
    values = {"context_str": "A goat.", "query_str": "What?"}
    assert said(schema.fill(values)) == DEFAULT_TEXT_QA_PROMPT_SEL.default_template.format(**values)


def loops(names: str) -> Any:
    for name in names:
        yield f"{name} "


def recursive(names: Annotated[str, MaxTokens(3)]) -> Any:
    yield names
    yield from recursive(names)


def calls_method(name: Annotated[str, MaxTokens(3)]) -> Any:
    yield f"{name.upper()}"


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (loops, {}, r"test_template.py, line \d+, column 5: a schema cannot say 'for name in names:'"),
        (recursive, {}, "recursive calls itself"),
        (calls_method, {}, r"cannot say 'name.upper\(\)'.* expected a parameter of calls_method: name"),
        (greeting, {}, "variable 'who' has no length"),
        (greeting, {"lengths": {"who": 3, "whom": 4}}, "unknown variable 'whom' in lengths"),
        ("{{ a }}", {"name": "s"}, "needs format=, one of 'jinja', 'f-string'"),
        ("{{ a }}", {"format": "jinja"}, "give the schema one: name="),
        ("a\n{{ a | upper }}", {"name": "s", "format": "jinja"}, "line 2: a schema cannot say what Filter does"),
        ("{% for a in b %}{% endfor %}", {"name": "s", "format": "jinja"}, "line 1: a schema cannot say what For does"),
        ("{% if a %}", {"name": "s", "format": "jinja"}, "template, line 1: "),
        ("{a", {"name": "s", "format": "f-string"}, "write {{ for a brace that is text"),
        ("{a.b}", {"name": "s", "format": "f-string"}, r"\{a.b\} is more than a name"),
        (3, {"name": "s"}, "int cannot be read as a template"),
        (ChatPromptTemplate([MessagesPlaceholder("history")]), {"name": "s"}, "MessagesPlaceholder has no text"),
        (PromptTemplate.from_template("{{a}}", template_format="mustache"), {"name": "s"}, "'mustache' are not read"),
    ],
)
def test_what_a_schema_cannot_say(template: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PMLError, match=message):
        Schema.from_template(template, **options)


def test_values_are_checked() -> None:
    schema = Schema.from_template(trip)
    with pytest.raises(PMLError, match="needs a value for 'duration'"):
        schema.fill({})
    with pytest.raises(PMLError, match="has no variable 'days'"):
        schema.fill({"days": 3})
    with pytest.raises(PMLError, match="1 more than the 8 of its parameter"):
        said(schema.fill({"duration": "nine days"}))
    with pytest.raises(PMLError, match="was not made of a template"):
        Schema.from_text('<schema name="s">a</schema>').fill({})
