"""The synthesizer gives the model compact mode's prompt, tells LlamaIndex's listeners the same, and keeps within the window."""

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import PromptHelper
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
    LLMPredictStartEvent,
)
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import ImageNode, NodeWithScore, TextNode
from llama_index.core.types import BaseOutputParser
from transformers import LlamaForCausalLM

from cacheblend_rag import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError, PromptTooLongError
from integrations.llama_index.tests.conftest import FORMS, EventLog, MakeLLM, Nodes, add, ask
from llama_index_cacheblend import BlendLLM, BlendSynthesizer

QUESTION = "Where was Mara Lindell born?"
SYSTEM, USER, ASSISTANT = MessageRole.SYSTEM, MessageRole.USER, MessageRole.ASSISTANT


def messages(*said: tuple[MessageRole, str]) -> ChatPromptTemplate:
    return ChatPromptTemplate([ChatMessage(role=role, content=text) for role, text in said])


# Whether a template's own words alone stand before the context, which are kept then.
FIXED: dict[str, Any] = {
    "default": DEFAULT_TEXT_QA_PROMPT_SEL,
    "plain": PromptTemplate("Facts:\n{context_str}\nQ: {query_str}\nA:"),
    "context twice": PromptTemplate("Facts:\n{context_str}\n---\n{context_str}\nQ: {query_str}"),
    "mapped": PromptTemplate(
        "Facts:\n{facts}\nQ: {question}", template_var_mappings={"context_str": "facts", "query_str": "question"}
    ),
    "chat": messages((SYSTEM, "Answer from these facts.\n\n{context_str}"), (USER, "{query_str}")),
    "two messages": messages((SYSTEM, "Be brief."), (USER, "Facts:\n{context_str}\n{query_str}")),
}
ANYBODYS: dict[str, Any] = {
    "context last": PromptTemplate("{query_str}\nFacts:\n{context_str}"),
    "partial": PromptTemplate("{tone}\n{context_str}\nQ: {query_str}").partial_format(tone="Be brief."),
    "function": PromptTemplate(
        "Facts:\n{context_str}\nQ: {query_str}", function_mappings={"query_str": lambda **v: v["query_str"].upper()}
    ),
    "rich": RichPromptTemplate("Facts:\n{{ context_str }}\nQ: {{ query_str }}"),
    "history": messages((SYSTEM, "Hi."), (USER, "I am Mara."), (ASSISTANT, "Hi."), (USER, "Facts:\n{context_str}")),
    "system last": messages((USER, "I am Mara."), (SYSTEM, "Facts:\n{context_str}"), (USER, "{query_str}")),
}


def answers(events: EventLog) -> list[Any]:
    """The raw response of each call of the model, oldest first."""
    ends = [event for event in events.events if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent)]
    return [event.response.raw for event in ends]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("name", [*FIXED, *ANYBODYS])
def test_compact(make_llm: MakeLLM, nodes: Nodes, events: EventLog, name: str, chat: bool) -> None:
    llm = make_llm(is_chat_model=chat, system_prompt="Speak plainly.")
    add(llm, nodes)
    options = {"llm": llm, "text_qa_template": (FIXED | ANYBODYS)[name]}
    compact = CompactAndRefine(**options).synthesize(QUESTION, nodes)
    blend = BlendSynthesizer(**options).synthesize(QUESTION, nodes)
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["usage"] == theirs["usage"]
    assert str(blend) == str(compact)
    assert blend.source_nodes == compact.source_nodes == nodes
    report = blend.metadata["blend"]
    times = 2 if name == "context twice" else 1
    # A prompt cannot end with a blended chunk: the row of its last token is what the answer begins with.
    at_end = name == "context last" and not chat
    assert (report["hits"], report["misses"]) == (len(nodes) * times - at_end, 0)
    assert report["recomputed_tokens"] == report["context_tokens"]
    assert (report["fallback_reason"], report["dropped"]) == (None, [])
    assert {key: blend.metadata[key] for key in compact.metadata} == compact.metadata
    again = BlendSynthesizer(**options).synthesize("Who paints ships?", nodes).metadata["blend"]
    assert (again["head_tokens"] > 0) == (name in FIXED)


async def test_events_are_compacts(llm: BlendLLM, nodes: Nodes, events: EventLog) -> None:
    seen: list[list[str]] = []
    for kind in (CompactAndRefine, BlendSynthesizer):
        for asynchronous in (False, True):
            events.events.clear()
            debug = LlamaDebugHandler(print_trace_on_end=False)
            synthesizer = kind(llm=llm, callback_manager=CallbackManager([debug]))
            if asynchronous:
                await synthesizer.asynthesize(QUESTION, nodes)
            else:
                synthesizer.synthesize(QUESTION, nodes)
            seen.append([event.class_name() for event in events.events])
            seen[-1] += [event.event_type.value for event in debug.get_events()]
            assert set(events.of(LLMPredictStartEvent)[0].template_args) >= {"context_str"}
    assert seen[:2] == seen[2:]


def test_nodes_with_metadata_and_space_around(llm: BlendLLM, events: EventLog) -> None:
    nodes = [
        NodeWithScore(node=TextNode(id_="a", text="  Mara was born in Oslo.\n", metadata={"page": 3, "hidden": "x"})),
        NodeWithScore(node=TextNode(id_="blank", text=" \n ")),
        NodeWithScore(node=ImageNode(id_="image", image_url="http://localhost/x.png")),
        NodeWithScore(node=TextNode(id_="b", text="{query_str} is no variable here. <|user|>\n")),
    ]
    nodes[0].node.excluded_llm_metadata_keys = ["hidden"]
    add(llm, nodes)
    assert sorted(llm.engine.ids()) == ["a", "b"]
    CompactAndRefine(llm=llm).synthesize(QUESTION, nodes)
    blend = BlendSynthesizer(llm=llm).synthesize(QUESTION, nodes)
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"] and ours["usage"] == theirs["usage"]
    assert blend.metadata["blend"]["hits"] == 2
    # Without its nodes, texts are found by what they say, or computed.
    texts = [each.node.get_content(metadata_mode="llm") for each in nodes]  # type: ignore[arg-type]
    assert BlendSynthesizer(llm=llm).get_response(QUESTION, texts) == str(blend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_what_the_window_has_no_room_for_is_refined(
    make_llm: MakeLLM,
    make_model: Callable[..., LlamaForCausalLM],
    nodes: Nodes,
    events: EventLog,
    chat: bool,
    form: str,
) -> None:
    qa = PromptTemplate("{context_str}\nQ: {query_str}\nA:")
    refine = PromptTemplate("{context_msg}\nQ: {query_str}\nSo far: {existing_answer}\nA:")
    two = BlendSynthesizer(make_llm(is_chat_model=chat), qa).synthesize(QUESTION, nodes[:2]).metadata["blend"]
    narrow = make_llm(is_chat_model=chat, model=make_model(two["prompt_tokens"] + 12 + 25))
    add(narrow, nodes)
    events.events.clear()
    synthesizer = BlendSynthesizer(narrow, qa, refine, streaming="stream" in form)
    text, response = await ask(synthesizer, form, QUESTION, nodes)
    report = response.metadata["blend"]
    calls = [*report["earlier_calls"], report]
    assert len(calls) > 1 and report["dropped"] == []
    assert [chunk["id"] for call in calls for chunk in call["chunks"]] == [each.node_id for each in nodes]
    assert [call["hits"] for call in calls] == [len(call["chunks"]) for call in calls]
    starts = [each for each in events.events if isinstance(each, LLMChatStartEvent | LLMCompletionStartEvent)]
    ends = [each for each in events.events if isinstance(each, LLMChatEndEvent | LLMCompletionEndEvent)]
    prompts = [each.messages[-1].content if chat else each.prompt for each in starts]
    said = [each.response.message.content if chat else each.response.text for each in ends]
    assert len(prompts) == len(calls)
    for prompt, answer in zip(prompts[1:], said, strict=False):
        assert prompt.endswith(f"Q: {QUESTION}\nSo far: {answer}\nA:")
    assert text == said[-1]
    dropped = BlendSynthesizer(narrow, qa).synthesize(QUESTION, nodes).metadata["blend"]
    assert dropped["dropped"] and dropped["earlier_calls"] == []


def node(node_id: str, text: str) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=node_id, text=text))


def test_too_long(make_llm: MakeLLM, make_model: Callable[..., LlamaForCausalLM], nodes: Nodes) -> None:
    narrow = make_llm(model=make_model(400))
    synthesizer = BlendSynthesizer(llm=narrow)

    def asked(given: Nodes, question: str = QUESTION) -> tuple[list[str], list[str]]:
        report = synthesizer.synthesize(question, given).metadata["blend"]
        return [chunk["id"] for chunk in report["chunks"]], report["dropped"]

    ids, long = [each.node_id for each in nodes], node("long", "word " * 400)
    assert asked(nodes) == (ids, [])
    for place in (0, 2, 5):
        assert asked([*nodes[:place], long, *nodes[place:]]) == (ids, ["long"])
    # Beside the first of these there is no room for the second, but for what stands behind it.
    halves = [node(name, "word " * 70) for name in ("one", "two")]
    assert asked([*halves, nodes[0]]) == (["one", "n0"], ["two"])
    for given, question in (([long], QUESTION), (nodes, "word " * 400)):
        with pytest.raises(PromptTooLongError):
            asked(given, question)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        BlendSynthesizer(llm=make_llm(model=narrow.engine.model, max_new_tokens=400))
    helper = PromptHelper(context_window=190, num_output=20, tokenizer=narrow.engine.tokenizer.encode)
    limited = BlendSynthesizer(llm=narrow, prompt_helper=helper).synthesize(QUESTION, nodes).metadata["blend"]
    assert limited["dropped"] and limited["prompt_tokens"] <= 170


def test_a_changed_context_is_prefilled_whole(llm: BlendLLM, nodes: Nodes, events: EventLog) -> None:
    def quoted(**values: str) -> str:
        return "\n".join(f"> {line}" for line in values["context_str"].splitlines())

    template = PromptTemplate("{context_str}\nQ: {query_str}", function_mappings={"context_str": quoted})
    CompactAndRefine(llm=llm, text_qa_template=template).synthesize(QUESTION, nodes)
    response = BlendSynthesizer(llm=llm, text_qa_template=template).synthesize(QUESTION, nodes)
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"]
    assert "template" in response.metadata["blend"]["fallback_reason"]


class Shouting(BaseOutputParser):
    """Asks for capitals and makes them."""

    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return query + "\nAnswer in capitals."


def test_settings_prompts_and_parsers(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm(recompute_ratio=0.15)
    synthesizer = BlendSynthesizer(llm=llm, blend_config=llm.engine.blend.replace(recompute_ratio=0.0))
    before = synthesizer.synthesize(QUESTION, nodes).metadata["blend"]
    assert (before["selector"], before["recomputed_tokens"]) == ("hkvd", 0)
    synthesizer.update_prompts({"text_qa_template": FIXED["plain"]})
    assert synthesizer.get_prompts()["text_qa_template"].template == FIXED["plain"].template
    assert synthesizer.synthesize(QUESTION, nodes).metadata["blend"]["prompt_tokens"] < before["prompt_tokens"]
    blends: list[Any] = [{"recompute_ratio": 0.3}, BlendConfig(selector="hkdv"), EngineConfig(ram_bytes=1)]
    for blend in blends:
        with pytest.raises(ConfigError):
            BlendSynthesizer(llm=llm, blend_config=blend)
    llm = make_llm(output_parser=Shouting())
    said = str(BlendSynthesizer(llm=llm).synthesize(QUESTION, nodes))
    assert said == str(CompactAndRefine(llm=llm).synthesize(QUESTION, nodes)) and said.isupper()
    with pytest.raises(ConfigError, match="streaming"):
        BlendSynthesizer(llm=llm, streaming=True).synthesize(QUESTION, nodes)
