from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import PromptHelper, SummaryIndex
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
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
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import ImageNode, NodeWithScore, TextNode
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_rag import BlendConfig, BlendPrompt, EngineConfig
from cacheblend_rag.errors import ConfigError, PromptTooLongError
from integrations.llama_index.tests.conftest import EventLog, MakeLLM, Nodes, add
from llama_index_cacheblend import (
    BlendCondensePlusContextChatEngine,
    BlendContextChatEngine,
    BlendLLM,
    BlendSynthesizer,
)
from llama_index_cacheblend.context import ContextPrompt, Rounds
from llama_index_cacheblend.nodes import node_chunks

QUESTION = "Where was Mara Lindell born?"

TEMPLATES: dict[str, Any] = {
    "default": None,
    "plain": PromptTemplate("Facts:\n{context_str}\nQ: {query_str}\nA:"),
    "context last": PromptTemplate("{query_str}\nFacts:\n{context_str}"),
    "context first": PromptTemplate("{context_str}\n\n{query_str}"),
    "context twice": PromptTemplate("{context_str}\n---\n{context_str}\nQ: {query_str}"),
    "partial": PromptTemplate("{tone}\n{context_str}\nQ: {query_str}").partial_format(tone="Be brief."),
    "mapped": PromptTemplate(
        "{facts}\nQ: {question}", template_var_mappings={"context_str": "facts", "query_str": "question"}
    ),
    "function": PromptTemplate(
        "{context_str}\nQ: {query_str}", function_mappings={"query_str": lambda **values: values["query_str"].upper()}
    ),
    "rich": RichPromptTemplate("Facts:\n{{ context_str }}\nQ: {{ query_str }}"),
    "chat": ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="Answer from these facts.\n\n{context_str}"),
            ChatMessage(role=MessageRole.USER, content="{query_str}"),
        ]
    ),
}


def answers(events: EventLog) -> list[Any]:
    """The raw response of each call of the model, oldest first."""
    ends = [event for event in events.events if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent)]
    return [event.response.raw for event in ends]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_compact(make_llm: MakeLLM, nodes: Nodes, events: EventLog, template: str, chat: bool) -> None:
    llm = make_llm(is_chat_model=chat, system_prompt="Speak plainly.")
    add(llm, nodes)
    options = {"text_qa_template": TEMPLATES[template]} if TEMPLATES[template] else {}
    compact = CompactAndRefine(llm=llm, **options).synthesize(QUESTION, nodes)
    blend = BlendSynthesizer(llm=llm, **options).synthesize(QUESTION, nodes)
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["usage"] == theirs["usage"]
    assert str(blend) == str(compact)
    assert blend.source_nodes == compact.source_nodes == nodes
    report = blend.metadata["blend"]
    times = 2 if template == "context twice" else 1
    # A prompt cannot end with a blended chunk: the row of its last token is what the answer begins with.
    at_end = template == "context last" and not chat
    assert (report["hits"], report["misses"]) == (len(nodes) * times - at_end, 0)
    assert report["selector"] == "hkvd"
    assert report["recomputed_tokens"] == report["context_tokens"]
    assert report["fallback_reason"] is None
    assert report["dropped"] == []
    assert {key: blend.metadata[key] for key in compact.metadata} == compact.metadata


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_all_four_forms_answer_alike(make_llm: MakeLLM, nodes: Nodes, chat: bool) -> None:
    llm = make_llm(recompute_ratio=0.3, is_chat_model=chat)
    add(llm, nodes)
    plain, streaming = BlendSynthesizer(llm=llm), BlendSynthesizer(llm=llm, streaming=True)
    sync = plain.synthesize(QUESTION, nodes)
    assert isinstance(sync, Response)
    asynchronous = await plain.asynthesize(QUESTION, nodes)
    assert isinstance(asynchronous, Response)
    stream = streaming.synthesize(QUESTION, nodes)
    assert isinstance(stream, StreamingResponse)
    astream = await streaming.asynthesize(QUESTION, nodes)
    assert isinstance(astream, AsyncStreamingResponse)
    assert stream.metadata["blend"] == {}
    pieces = list(stream.response_gen)
    assert len(pieces) > 1
    assert "".join(pieces) == sync.response
    assert "".join([piece async for piece in astream.async_response_gen()]) == sync.response
    assert asynchronous.response == sync.response
    for response in (sync, asynchronous, stream, astream):
        report = response.metadata["blend"]
        assert report["hits"] == len(nodes)
        assert report["output_tokens"] == 12
        assert 0 < report["charged_ratio"] < 1
        assert [chunk["id"] for chunk in report["chunks"]] == [each.node.node_id for each in nodes]
        assert response.source_nodes == nodes


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
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]


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
    compact = CompactAndRefine(llm=llm).synthesize(QUESTION, nodes)
    blend = BlendSynthesizer(llm=llm).synthesize(QUESTION, nodes)
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["usage"] == theirs["usage"]
    assert str(blend) == str(compact)
    assert blend.metadata["blend"]["hits"] == 2


def test_called_without_nodes(llm: BlendLLM, nodes: Nodes) -> None:
    synthesizer = BlendSynthesizer(llm=llm)
    report: dict[str, Any] = {}
    text = synthesizer.get_response(QUESTION, [each.node.text for each in nodes], blend_report=report)
    assert text == str(synthesizer.synthesize(QUESTION, nodes))
    assert report["misses"] == len(nodes)


async def test_nothing_retrieved(llm: BlendLLM) -> None:
    plain = BlendSynthesizer(llm=llm, empty_response="Nobody knows.")
    streaming = BlendSynthesizer(llm=llm, streaming=True)
    for response in (plain.synthesize(QUESTION, []), await plain.asynthesize(QUESTION, [])):
        assert str(response) == "Nobody knows."
        assert response.metadata == {"blend": None}
    assert list(streaming.synthesize(QUESTION, []).response_gen) == ["Empty Response"]
    astream = await streaming.asynthesize(QUESTION, [])
    assert [piece async for piece in astream.async_response_gen()] == ["Empty Response"]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_what_the_window_has_no_room_for_is_refined(
    make_llm: MakeLLM, make_model: Callable[..., LlamaForCausalLM], nodes: Nodes, events: EventLog, chat: bool
) -> None:
    qa = PromptTemplate("{context_str}\nQ: {query_str}\nA:")
    refine = PromptTemplate("{context_msg}\nQ: {query_str}\nSo far: {existing_answer}\nA:")
    options = {"text_qa_template": qa, "refine_template": refine}
    wide = make_llm(is_chat_model=chat)
    two = BlendSynthesizer(llm=wide, text_qa_template=qa).synthesize(QUESTION, nodes[:2])
    narrow = make_llm(is_chat_model=chat, model=make_model(two.metadata["blend"]["prompt_tokens"] + 12 + 25))
    add(narrow, nodes)
    events.events.clear()
    response = BlendSynthesizer(llm=narrow, **options).synthesize(QUESTION, nodes)
    report = response.metadata["blend"]
    calls = [*report["earlier_calls"], report]
    assert len(calls) > 1
    assert [chunk["id"] for call in calls for chunk in call["chunks"]] == [each.node.node_id for each in nodes]
    assert [call["hits"] for call in calls] == [len(call["chunks"]) for call in calls]
    assert report["dropped"] == []
    starts = [each for each in events.events if isinstance(each, LLMChatStartEvent | LLMCompletionStartEvent)]
    ends = [each for each in events.events if isinstance(each, LLMChatEndEvent | LLMCompletionEndEvent)]
    prompts = [each.messages[-1].content if chat else each.prompt for each in starts]
    said = [each.response.message.content if chat else each.response.text for each in ends]
    assert len(prompts) == len(calls)
    for prompt, answer in zip(prompts[1:], said, strict=False):
        assert prompt.endswith(f"Q: {QUESTION}\nSo far: {answer}\nA:")
    assert response.response == said[-1]
    # The last call is the one that streams.
    stream = BlendSynthesizer(llm=narrow, streaming=True, **options).synthesize(QUESTION, nodes)
    assert "".join(stream.response_gen) == response.response
    assert [call["chunks"] for call in stream.metadata["blend"]["earlier_calls"]] == [
        call["chunks"] for call in report["earlier_calls"]
    ]
    again = await BlendSynthesizer(llm=narrow, **options).asynthesize(QUESTION, nodes)
    assert again.response == response.response
    astream = await BlendSynthesizer(llm=narrow, streaming=True, **options).asynthesize(QUESTION, nodes)
    assert "".join([piece async for piece in astream.async_response_gen()]) == response.response
    dropped = BlendSynthesizer(llm=narrow, overflow="drop", **options).synthesize(QUESTION, nodes)
    assert dropped.metadata["blend"]["dropped"]
    assert dropped.metadata["blend"]["earlier_calls"] == []


def node(node_id: str, text: str) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=node_id, text=text))


def ids_of(report: dict[str, Any]) -> list[str]:
    return [chunk["id"] for chunk in report["chunks"]]


@pytest.fixture
def narrow(make_llm: MakeLLM, make_model: Callable[..., LlamaForCausalLM]) -> BlendLLM:
    return make_llm(model=make_model(400))


@pytest.mark.parametrize("place", [0, 2, 5])
def test_too_long(narrow: BlendLLM, nodes: Nodes, place: int, caplog: pytest.LogCaptureFixture) -> None:
    synthesizer = BlendSynthesizer(llm=narrow)
    alone = synthesizer.synthesize(QUESTION, nodes)
    assert alone.metadata["blend"]["dropped"] == []
    with_long = [*nodes[:place], node("long", "word " * 400), *nodes[place:]]
    caplog.clear()
    response = synthesizer.synthesize(QUESTION, with_long)
    assert ids_of(response.metadata["blend"]) == [each.node.node_id for each in nodes]
    assert response.metadata["blend"]["dropped"] == ["long"]
    assert response.response == alone.response
    assert "no room for 1 of 6 chunks, ['long']" in caplog.text
    # Beside the first of these there is no room for the second, but for what stands behind it.
    halves = [node(name, "word " * 70) for name in ("one", "two")]
    report = synthesizer.synthesize(QUESTION, [*halves, nodes[0]]).metadata["blend"]
    assert (ids_of(report), report["dropped"]) == (["one", "n0"], ["two"])


@pytest.mark.parametrize("streaming", [False, True])
async def test_refining_ends(narrow: BlendLLM, nodes: Nodes, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    synthesizer = BlendSynthesizer(llm=narrow, overflow="refine", streaming=streaming)
    halves = [node(name, "word " * 70) for name in ("one", "two")]
    asked = [nodes[0], node("long", "word " * 400), *halves, node("longer", "word " * 500)]

    async def ask() -> list[Any]:
        response, later = synthesizer.synthesize(QUESTION, asked), await synthesizer.asynthesize(QUESTION, asked)
        if streaming:
            # Filled when the streams end.
            texts = ["".join(response.response_gen), "".join([piece async for piece in later.async_response_gen()])]
        else:
            texts = [str(response), str(later)]
        return [*zip(texts, (response.metadata["blend"], later.metadata["blend"]), strict=True)]

    (text, report), again = await ask()
    assert report["dropped"] == ["long", "longer"]
    assert [ids_of(call) for call in (*report["earlier_calls"], report)] == [["n0", "one"], ["two"]]
    assert (text, report["dropped"]) == (again[0], again[1]["dropped"])
    # A template that leaves the next call no room: the answer so far is the answer.
    synthesizer.update_prompts({"refine_template": PromptTemplate("a " * 250 + "{context_msg} {existing_answer}")})
    caplog.clear()
    results = await ask()
    for said, last in results:
        assert ids_of(last) == ["n0", "one"]
        assert (last["earlier_calls"], last["dropped"]) == ([], ["long", "longer", "two"])
        assert said == results[0][0] != ""
    assert "['two']; split documents" in caplog.text


def test_an_object_is_the_answer_where_refining_gives_up(nodes: Nodes) -> None:
    class Place(BaseModel):
        name: str

    rounds = Rounds("?", node_chunks(each.node for each in nodes), {}, None, {}, False)
    prompt = ContextPrompt("", None, "", BlendPrompt(segments=[""]), left_over=tuple(rounds.chunks[2:]))
    rounds.refine(prompt, CompletionResponse(text="", raw={"blend": {"hits": 2}}), Place(name="Oslo"))
    assert rounds.answer == '{"name":"Oslo"}'
    rounds.give_up()
    assert rounds.last == Place(name="Oslo")
    assert rounds.report == {"hits": 2, "dropped": ["n2", "n3", "n4"], "earlier_calls": []}


def test_what_has_no_room_at_all_is_said(narrow: BlendLLM, make_llm: MakeLLM, nodes: Nodes) -> None:
    long = node("long", "word " * 400)
    for overflow in ("drop", "refine"):
        synthesizer = BlendSynthesizer(llm=narrow, overflow=overflow)  # type: ignore[arg-type]
        with pytest.raises(PromptTooLongError, match=r"chunk 'long' has \d+ tokens, .* no other chunk"):
            synthesizer.synthesize(QUESTION, [long, node("longer", "word " * 500)])
        with pytest.raises(PromptTooLongError, match=r"without any chunk, .* \d+ tokens, but 388 .*shorten") as error:
            synthesizer.synthesize("why " * 500, nodes)
        assert "n0" not in str(error.value)
    with pytest.raises(ConfigError, match="overflow='split'"):
        BlendSynthesizer(llm=narrow, overflow="split")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"max_new_tokens=1024 leaves no room .* window of 1024 tokens"):
        BlendSynthesizer(llm=make_llm(max_new_tokens=1024))


def test_an_answer_from_before_is_refined(llm: BlendLLM, nodes: Nodes, events: EventLog) -> None:
    texts = [each.node.text for each in nodes]
    # LlamaIndex's own has the context in the middle of a line, where tokens of a text and of its parts may differ.
    template = PromptTemplate("Context:\n{context_msg}\nQuery: {query_str}\nOriginal Answer: {existing_answer}\nNew:")
    for kind in (CompactAndRefine, BlendSynthesizer):
        kind(llm=llm, refine_template=template).get_response(QUESTION, texts, prev_response="In Rome.")
    theirs, ours = answers(events)
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["usage"] == theirs["usage"]


def test_a_prompt_helper_limits_the_prompt(llm: BlendLLM, nodes: Nodes) -> None:
    template = PromptTemplate("{context_str}\nQ: {query_str}\nA:")
    three = BlendSynthesizer(llm=llm, text_qa_template=template).synthesize(QUESTION, nodes[:3])
    tokens = three.metadata["blend"]["prompt_tokens"]
    helper = PromptHelper(context_window=tokens + 50 + 3, num_output=50, tokenizer=str.split)
    synthesizer = BlendSynthesizer(llm=llm, text_qa_template=template, prompt_helper=helper)
    assert synthesizer._prompt_helper is helper
    assert synthesizer.synthesize(QUESTION, nodes).metadata["blend"]["dropped"] == ["n3", "n4"]


def test_nothing_written(make_llm: MakeLLM, tokenizer: PreTrainedTokenizerFast, nodes: Nodes) -> None:
    end = tokenizer.eos_token_id
    llm = make_llm(generation_kwargs={"prefix_allowed_tokens_fn": lambda batch, ids: [end], "eos_token_id": end})
    compact = CompactAndRefine(llm=llm).synthesize(QUESTION, nodes)
    assert BlendSynthesizer(llm=llm).synthesize(QUESTION, nodes).response == compact.response == "Empty Response"


def test_a_changed_context_is_prefilled_whole(llm: BlendLLM, nodes: Nodes, events: EventLog) -> None:
    def quoted(**values: str) -> str:
        return "\n".join(f"> {line}" for line in values["context_str"].splitlines())

    for function in (quoted, lambda **values: values["context_str"].upper()):
        template = PromptTemplate("{context_str}\nQ: {query_str}", function_mappings={"context_str": function})
        events.events.clear()
        CompactAndRefine(llm=llm, text_qa_template=template).synthesize(QUESTION, nodes)
        response = BlendSynthesizer(llm=llm, text_qa_template=template).synthesize(QUESTION, nodes)
        theirs, ours = answers(events)
        assert ours["token_ids"] == theirs["token_ids"]
        assert "cannot be told apart" in response.metadata["blend"]["fallback_reason"]


def test_prompts_can_be_seen_and_replaced(llm: BlendLLM, nodes: Nodes) -> None:
    synthesizer = BlendSynthesizer(llm=llm)
    assert set(synthesizer.get_prompts()) == {"text_qa_template", "refine_template"}
    before = synthesizer.synthesize(QUESTION, nodes).metadata["blend"]["prompt_tokens"]
    synthesizer.update_prompts({"text_qa_template": TEMPLATES["plain"]})
    assert synthesizer.synthesize(QUESTION, nodes).metadata["blend"]["prompt_tokens"] < before


def test_settings_of_a_synthesizer(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm(recompute_ratio=0.15)
    blend = llm.engine.blend.replace(selector="none")
    report = BlendSynthesizer(llm=llm, blend_config=blend).synthesize(QUESTION, nodes).metadata["blend"]
    assert (report["selector"], report["recomputed_tokens"]) == ("none", 0)


class Shouting(BaseOutputParser):
    """Asks for capitals and makes them."""

    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return query + "\nAnswer in capitals."


@pytest.mark.parametrize(
    ("blend", "said"),
    [
        ({"recompute_ratio": 0.3}, "expected BlendConfig, not the dict"),
        (BlendConfig(selector="hkdv"), "unknown selector 'hkdv'"),
        (BlendConfig(selector="hkvd(check_layers=[99])"), "99"),
        (EngineConfig(ram_bytes=1), "expected BlendConfig, not the EngineConfig"),
    ],
)
def test_wrong_settings_are_said_before_a_question(make_llm: MakeLLM, blend: Any, said: str) -> None:
    llm = make_llm()
    with pytest.raises(ConfigError, match=said):
        BlendSynthesizer(llm=llm, blend_config=blend)
    retriever = SummaryIndex([]).as_retriever()
    for engine in (BlendContextChatEngine, BlendCondensePlusContextChatEngine):
        with pytest.raises(ConfigError, match=said):
            engine.from_defaults(retriever, llm=llm, blend_config=blend)


def test_output_parsers(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm(output_parser=Shouting())
    blend = BlendSynthesizer(llm=llm).synthesize(QUESTION, nodes)
    assert str(blend) == str(CompactAndRefine(llm=llm).synthesize(QUESTION, nodes))
    assert str(blend).isupper()
    with pytest.raises(ConfigError, match="streaming=False"):
        BlendSynthesizer(llm=llm, streaming=True).synthesize(QUESTION, nodes)
