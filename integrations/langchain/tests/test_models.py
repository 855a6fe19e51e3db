"""`BlendLLM` and `ChatBlend`: what they ask the engine, and what they tell LangChain."""

import copy
import json
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    messages_from_dict,
    messages_to_dict,
    trim_messages,
)
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue

from cacheblend_attachments import inspector_page
from cacheblend_rag import BlendConfig, BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError
from integrations.langchain.tests.asking import KINDS, Kind, chunk_ids, text_of
from langchain_cacheblend import BlendLLM, ChatBlend, documents_to_blocks

TOKENS = 12


@pytest.fixture
def context(engine: BlendEngine, chunks: dict[str, str]) -> str:
    engine.add(Chunk(text, id) for id, text in chunks.items())
    return "\n\n".join(["A text that nobody stored.", *chunks.values()])


def info_of(llm: BaseLanguageModel[Any], text: str, **options: Any) -> dict[str, Any]:
    ((generation,),) = llm.generate_prompt([StringPromptValue(text=text)], **options).generations
    return generation.message.response_metadata if hasattr(generation, "message") else generation.generation_info


def test_usage_and_report(engine: BlendEngine, context: str, chunks: dict[str, str]) -> None:
    llm = ChatBlend(engine=engine, max_tokens=TOKENS, blend_config=BlendConfig(recompute_ratio=0.25, selector="random"))
    asked = context + "\nWho?"
    answer = llm.invoke(asked)
    report, usage = answer.response_metadata["blend"], answer.usage_metadata
    assert (report["hits"], report["recompute_ratio"]) == (len(chunks), 0.25)
    assert answer.response_metadata["finish_reason"] == "length"
    assert inspector_page(engine, report).lower().startswith("<!doctype html>")
    tokens = llm.get_num_tokens_from_messages([HumanMessage(asked)])
    assert usage["input_tokens"] == report["prompt_tokens"] == tokens
    assert usage["output_tokens"] == TOKENS
    assert usage["input_token_details"] == {"cache_read": report["context_tokens"] - report["recomputed_tokens"]}
    pieces = list(llm.stream(asked))
    whole = sum(pieces[1:], start=pieces[0])
    assert pieces[-1].chunk_position == "last"
    assert (whole.text, whole.usage_metadata, pieces[-1].usage_metadata) == (answer.text, usage, usage)
    assert whole.response_metadata["blend"]["hits"] == len(chunks)
    [read] = messages_from_dict(json.loads(json.dumps(messages_to_dict([answer]))))
    assert read.response_metadata["blend"] == report
    full = llm.invoke(asked, blend_config=engine.blend.replace(enabled=False))
    assert full.usage_metadata["input_token_details"] == {"cache_read": 0}
    result = BlendLLM(engine=engine, max_tokens=TOKENS).generate([context, asked])
    assert result.llm_output["token_usage"]["completion_tokens"] == 2 * TOKENS


@KINDS
def test_stop_strings_end_the_answer_and_are_not_shown(kind: Kind, engine: BlendEngine, context: str) -> None:
    free = kind(engine=engine, max_tokens=16)
    whole = text_of(free.invoke(context))
    stop = whole[len(whole) // 2 :][:3]
    wanted = whole[: whole.index(stop)]
    bound = kind(engine=engine, max_tokens=16, stop=[stop])
    for llm, options in [(free, {"stop": [stop, "never there"]}), (bound, {}), (bound, {"stop": [stop]})]:
        assert text_of(llm.invoke(context, **options)) == wanted
        assert "".join(map(text_of, llm.stream(context, **options))) == wanted
    assert text_of(bound.invoke(context, stop=["never there"])) == whole
    info = info_of(bound, context)
    assert info["finish_reason"] == "stop"
    assert info["blend"]["output_tokens"] < 16


@KINDS
def test_generation_options_at_construction_and_per_call(kind: Kind, engine: BlendEngine, context: str) -> None:
    greedy = text_of(kind(engine=engine, max_tokens=TOKENS).invoke(context))
    sampling = kind(
        engine=engine, max_tokens=TOKENS, temperature=3.0, top_k=0, generation_kwargs={"repetition_penalty": 1.1}
    )
    torch.manual_seed(1)
    assert text_of(sampling.invoke(context)) != greedy
    assert text_of(sampling.invoke(context, temperature=0, repetition_penalty=1.0)) == greedy
    assert text_of(sampling.bind(temperature=0, repetition_penalty=1.0).invoke(context)) == greedy
    draws = [text_of(sampling.invoke(context, seed=seed)) for seed in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]
    for options in ({"max_tokens": 2}, {"max_new_tokens": 2}):
        assert info_of(sampling, context, **options)["blend"]["output_tokens"] == 2
    for options in ({"temprature": 0}, {"tool": []}, {"num_beams": 4}, {"past_key_values": object()}):
        with pytest.raises(ConfigError):
            sampling.invoke(context, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"stop": "x"},
        {"stop": [""]},
        {"timeout": 0},
        {"blend_config": 1},
        {"logits_processor": 1},
        {"stopping_criteria": 1, "stop": ["x"]},
        {"max_new_tokens": "five"},
        {"recompute_ratio": 0.2},
        {"max_token": 10},
    ],
)
@KINDS
def test_what_has_no_meaning_is_refused(kind: Any, engine: BlendEngine, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        kind()
    with pytest.raises(ConfigError):
        kind(engine=engine, temperature=0).invoke("Who?", **options)
    with pytest.raises(ConfigError):
        kind(engine=engine, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_ctx": 4096}, r"model_kwargs=\{'n_ctx'"),
        ({"temprature": 0}, r"temprature, did you mean temperature\?"),
        ({"recompute_ratio": 0.2}, r"blend_config=BlendConfig\(recompute_ratio"),
        ({"logprobs": True}, "logprobs=True is not supported"),
    ],
)
@KINDS
def test_what_belongs_elsewhere_is_said_to(kind: Any, engine: BlendEngine, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(engine=engine, **given)
    if "logprobs" in given:
        with pytest.raises(ConfigError, match=said):
            kind(engine=engine).invoke("Who?", **given)
        assert text_of(kind(engine=engine, max_tokens=2).invoke("Who?", logprobs=False))


def test_documents_as_blocks_are_chunks_as_they_are(engine: BlendEngine, chunks: dict[str, str], context: str) -> None:
    llm = ChatBlend(engine=engine, max_tokens=TOKENS)
    documents = [Document("x", id="tiny"), Document(chunks["goat"], id="goat"), Document(chunks["mara"]), Document("")]
    content = [{"type": "text", "text": "Read:"}, *documents_to_blocks(documents), "\n\nWho?"]
    message = HumanMessage(content)
    prompt = llm.blend_prompt([message])
    assert [s.text for s in prompt.segments if isinstance(s, Chunk)] == [d.page_content for d in documents[:3]]
    flat = llm.blend_prompt([HumanMessage("\n\n".join(["Read:", *(d.page_content for d in documents[:3]), "Who?"]))])
    assert engine.prompt_ids(prompt) == engine.prompt_ids(flat)
    report = llm.invoke([message]).response_metadata["blend"]
    assert (report["hits"], report["misses"]) == (2, 1)
    # A string model writes messages as one text, and loses nothing of them.
    llm = BlendLLM(engine=engine, max_tokens=TOKENS)
    string = llm.blend_prompt([message])
    assert chunk_ids(string) == ["tiny", "goat", None]
    result = llm.generate_prompt([ChatPromptValue(messages=[message])])
    assert result.generations[0][0].generation_info["blend"]["hits"] == 3


def test_tokens_are_counted_as_the_template_shows_them(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine, max_tokens=4)
    history = [HumanMessage("Hello there."), AIMessage("Hi.")] * 3
    kept = trim_messages(history, max_tokens=20, token_counter=llm, strategy="last", start_on="human")
    assert kept and kept == history[-len(kept) :]
    assert llm.get_num_tokens_from_messages(history) == len(engine.prompt_ids(llm.blend_prompt(history)))
    own, engine.tokenizer.chat_template = engine.tokenizer.chat_template, "{{ raise_exception('begin with a user') }}"
    try:
        # What no template shows is counted by itself.
        assert llm.get_num_tokens_from_messages([AIMessage("Hi.")]) == llm.get_num_tokens("Hi.") > 0
        engine.tokenizer.chat_template = None
        with pytest.raises(ConfigError):
            llm.invoke("hello")
    finally:
        engine.tokenizer.chat_template = own


@KINDS
def test_a_copy_shares_the_engine(kind: Any, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=4, generation_kwargs={"repetition_penalty": 1.1})
    copied = copy.deepcopy(llm)
    assert copied.engine is engine and text_of(copied.invoke("Who?")) == text_of(llm.invoke("Who?"))
    copied.generation_kwargs["repetition_penalty"] = 2.0
    assert llm.generation_kwargs == {"repetition_penalty": 1.1}
