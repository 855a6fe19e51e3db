"""`BlendLLM` and `ChatBlend`: what they ask the engine, and what they tell LangChain."""

import asyncio
import copy
import json
import pickle
import time
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
    trim_messages,
)
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from transformers import LlamaForCausalLM

from cacheblend_attachments import inspector_page
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError
from integrations.langchain.tests.asking import KINDS, Kind, chunk_ids, own_answer, text_of
from langchain_cacheblend import BlendLLM, ChatBlend, documents_to_blocks

TEMPLATE = "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}"
QUESTION = "Where does the goat live?"
TOKENS = 12


@pytest.fixture
def context(engine: BlendEngine, chunks: dict[str, str]) -> str:
    engine.add(Chunk(text, id) for id, text in chunks.items())
    return "\n\n".join(["A text that nobody stored.", *chunks.values()])


def info_of(llm: BaseLanguageModel[Any], text: str, **options: Any) -> dict[str, Any]:
    ((generation,),) = llm.generate_prompt([StringPromptValue(text=text)], **options).generations
    return generation.message.response_metadata if hasattr(generation, "message") else generation.generation_info


@KINDS
def test_at_ratio_one_a_chain_is_exact(kind: Kind, engine: BlendEngine, context: str, chunks: dict[str, str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    form = PromptTemplate.from_template(TEMPLATE) if kind is BlendLLM else ChatPromptTemplate.from_template(TEMPLATE)
    inputs = {"context": context, "question": QUESTION}
    prompt = llm.blend_prompt(form.invoke(inputs))
    assert chunk_ids(prompt) == list(chunks)
    assert engine.generate(prompt, 1).report.hits == len(chunks)
    full = form | llm.bind(blend_config=engine.blend.replace(recompute_ratio=1.0, selector="full"))
    assert text_of(full.invoke(inputs)) == own_answer(engine, prompt, TOKENS)
    # Borders beside line breaks: the same tokens as those of the whole text.
    ids = engine.tokenizer("".join(getattr(each, "text", each) for each in prompt.segments), add_special_tokens=False)
    bos = engine.tokenizer.bos_token_id
    assert [token for token in engine.prompt_ids(prompt) if token != bos] == [t for t in ids["input_ids"] if t != bos]
    assert engine.prompt_ids(prompt).count(bos) == 1


def test_the_chat_prompt_is_the_chat_template(engine: BlendEngine, context: str) -> None:
    llm = ChatBlend(engine=engine)
    messages = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Yes?"), HumanMessage(context + "\nWho?")]
    prompt = llm.blend_prompt(messages)
    roles = ["system", "user", "assistant", "user"]
    turns = [{"role": role, "content": message.content} for role, message in zip(roles, messages, strict=True)]
    rendered = engine.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert "".join(s.text if isinstance(s, Chunk) else s for s in prompt.segments) == rendered
    assert llm.get_num_tokens_from_messages(messages) == len(engine.prompt_ids(prompt))


def test_usage_and_report(engine: BlendEngine, context: str, chunks: dict[str, str]) -> None:
    llm = ChatBlend(engine=engine, max_tokens=TOKENS, blend_config=BlendConfig(recompute_ratio=0.25, selector="random"))
    answer = llm.invoke(context + "\nWho?")
    assert isinstance(answer, AIMessage)
    report = answer.response_metadata["blend"]
    usage = answer.usage_metadata
    assert usage is not None
    assert report["hits"] == len(chunks)
    assert report["recompute_ratio"] == 0.25
    assert answer.response_metadata["finish_reason"] == "length"
    assert inspector_page(engine, report).lower().startswith("<!doctype html>")
    tokens = llm.get_num_tokens_from_messages([HumanMessage(context + "\nWho?")])
    assert usage["input_tokens"] == report["prompt_tokens"] == tokens
    assert usage["output_tokens"] == TOKENS
    assert usage["input_token_details"] == {"cache_read": report["context_tokens"] - report["recomputed_tokens"]}
    assert 0 < report["recomputed_tokens"] < report["context_tokens"]
    *_, last = llm.stream(context + "\nWho?")
    whole = sum(list(llm.stream(context + "\nWho?"))[1:], start=next(llm.stream(context + "\nWho?")))
    assert last.chunk_position == "last"
    assert whole.usage_metadata == last.usage_metadata == usage
    assert whole.response_metadata["blend"]["hits"] == len(chunks)
    assert inspector_page(engine, whole.response_metadata["blend"])
    [read] = messages_from_dict(json.loads(json.dumps(messages_to_dict([answer]))))
    assert type(read.response_metadata["blend"]) is dict and read.response_metadata["blend"] == report
    assert whole.text == answer.text
    full = llm.invoke(context + "\nWho?", blend_config=engine.blend.replace(enabled=False))
    assert full.usage_metadata["input_token_details"] == {"cache_read": 0}
    result = BlendLLM(engine=engine, max_tokens=TOKENS).generate([context, context + "\nWho?"])
    assert [each[0].generation_info["blend"]["output_tokens"] for each in result.generations] == [TOKENS] * 2
    assert result.llm_output["token_usage"]["completion_tokens"] == 2 * TOKENS


def test_what_an_earlier_prompt_began_with_is_counted_once(
    tiny: LlamaForCausalLM, tokenizer: Any, chunks: dict[str, str]
) -> None:
    with BlendEngine(tiny, tokenizer, **engine_settings(self_check=False, prefix_bytes=2**26)) as engine:
        engine.add(Chunk(text, id) for id, text in chunks.items())
        llm, asked = ChatBlend(engine=engine, max_tokens=TOKENS), "\n\n".join([*chunks.values(), "Who?"])
        first, second = (llm.invoke(asked).usage_metadata for _ in range(2))
        assert 0 < first["input_token_details"]["cache_read"] < first["input_tokens"] - 1
        # All but the last token, which is always computed.
        assert second["input_token_details"]["cache_read"] == second["input_tokens"] - 1


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
    with pytest.raises(ConfigError, match="empty"):
        free.invoke(context, stop=[""])


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
    for options in ({"max_tokens": 2}, {"max_new_tokens": 2}):
        assert info_of(sampling, context, **options)["blend"]["output_tokens"] == 2
    for options in ({"temprature": 0}, {"tool": []}, {"num_beams": 4}, {"past_key_values": object()}):
        with pytest.raises(ConfigError):
            sampling.invoke(context, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": "five"}, "max_tokens: "),
        ({"max_tokens": 2.5}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": "warm"}, "temperature: "),
        ({"temperature": -1}, "temperature: "),
        ({"temperature": float("nan")}, "temperature: "),
        ({"top_p": 2}, "top_p: "),
        ({"top_k": -1}, "top_k: "),
        ({"max_new_tokens": "five"}, "max_new_tokens='five'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"stop": [1]}, r"stop=\[1\] holds 1"),
        ({"stop": 1}, "stop=1 is a int"),
        ({"stop": "x"}, "stop is the string"),
        ({"blend_config": 1}, "expected BlendConfig, not the int 1"),
        ({"logits_processor": 1}, "logits_processor is the int 1"),
        ({"stopping_criteria": 1}, "stopping_criteria is the int 1"),
        ({"stopping_criteria": 1, "stop": ["x"]}, "stopping_criteria is the int 1"),
    ],
)
@KINDS
def test_what_has_no_meaning_is_refused(kind: Any, engine: BlendEngine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="name a model"):
        kind()
    with pytest.raises(ConfigError, match=said):
        kind(engine=engine, temperature=0).invoke("Who?", **options)
    if not options.keys() & {"logits_processor", "stopping_criteria", "max_new_tokens"}:
        with pytest.raises(ConfigError, match=r"stop|" + said):
            kind(engine=engine, **options)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model_id", "gpt2", "give model"),
        ("repo_id", "gpt2", "give model"),
        ("pipeline_kwargs", {"max_new_tokens": 10}, "give max_tokens, temperature"),
        ("pipeline", object(), r"engine=BlendEngine\(pipeline.model"),
        ("llm", object(), "give the name of its model as model"),
        ("device", 0, r"engine_config=EngineConfig\(device=...\)|settings of EngineConfig"),
        ("device_map", "auto", "give model_kwargs={'device_map': ...}"),
        ("task", "text-generation", "text is always generated"),
    ],
)
def test_words_of_hugging_face_are_answered_with_ours(engine: BlendEngine, name: str, value: Any, said: str) -> None:
    for kind in (ChatBlend, BlendLLM):
        with pytest.raises(ConfigError, match=rf"{name}.*({said})"):
            kind(engine=engine, **{name: value})
        with pytest.raises(ConfigError, match=rf"{name}.*({said})"):
            kind(engine=engine).invoke("Who?", **{name: value})
    with pytest.raises(ConfigError, match=r"unknown parameter max_new_tokens \(give max_tokens\)"):
        ChatBlend(engine=engine, max_new_tokens=10)
    with pytest.raises(ConfigError, match=r"unknown parameter max_token, did you mean max_tokens\?"):
        ChatBlend(engine=engine, max_token=10)
    with pytest.raises(ConfigError, match=r"unknown option max_token, did you mean max_tokens\?"):
        ChatBlend(engine=engine).invoke("Who?", max_token=10)


def test_settings_of_the_engine_among_the_options_are_shown_their_place(engine: BlendEngine) -> None:
    with pytest.raises(ConfigError, match=r"blend_config=BlendConfig\(\.\.\.\)"):
        ChatBlend(engine=engine, recompute_ratio=0.2)
    with pytest.raises(ConfigError, match="recompute_ratio: settings of BlendConfig, not options"):
        ChatBlend(engine=engine).invoke("Who?", recompute_ratio=0.2)


def test_options_of_a_call_are_read_as_those_of_the_object(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine, max_tokens=9, temperature=0)
    assert llm.invoke("Who?", max_tokens="5").usage_metadata["output_tokens"] == 5
    assert llm.invoke("Who?", max_tokens=None, temperature="0").usage_metadata["output_tokens"] == 9
    with pytest.raises(ConfigError, match="expected BlendConfig, not the dict"):
        engine.generate(BlendPrompt("Who?"), 1, blend={"recompute_ratio": 1.0})  # type: ignore[arg-type]


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.seen.append(token)


@KINDS
def test_callbacks_see_the_tokens_of_a_stream(kind: Kind, engine: BlendEngine, context: str) -> None:
    handler = Tokens()
    pieces = [text_of(p) for p in kind(engine=engine, max_tokens=TOKENS).stream(context, {"callbacks": [handler]})]
    assert [piece for piece in handler.seen if piece] == [piece for piece in pieces if piece]
    assert len(pieces) > 2


def test_an_unread_stream_blocks_nobody(engine: BlendEngine, context: str) -> None:
    llm = BlendLLM(engine=engine, max_tokens=1000)
    stream = llm.stream(context)
    next(stream)
    started = time.perf_counter()
    stream.close()
    del stream
    assert llm.invoke(context, max_tokens=2)
    assert time.perf_counter() - started < 5
    held = ChatBlend(engine=engine, max_tokens=TOKENS).stream(context)
    next(held)
    assert llm.invoke(context, max_tokens=2)
    assert "".join(map(text_of, held))


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


@pytest.mark.parametrize(
    "messages",
    [
        [HumanMessage([{"type": "image", "url": "http://somewhere/a.png"}])],
        [HumanMessage([{"type": "text-plain", "mime_type": "text/plain", "url": "http://somewhere/a.txt"}])],
        [],
    ],
)
def test_messages_that_cannot_be_shown(engine: BlendEngine, messages: list[Any]) -> None:
    with pytest.raises(PromptError):
        ChatBlend(engine=engine).blend_prompt([*messages]) if messages else BlendLLM(engine=engine).invoke("")


STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
)


def test_a_template_that_is_particular_about_roles(tiny: LlamaForCausalLM, tokenizer: Any) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = STRICT
    with BlendEngine(tiny, strict, **engine_settings(self_check=False)) as engine:
        llm = ChatBlend(engine=engine, max_tokens=4)
        prompt = llm.blend_prompt([SystemMessage("Be brief."), HumanMessage("Where?")])
        assert prompt.segments == ["[user]Be brief.\n\nWhere?"]
        history = [HumanMessage("Hello there."), AIMessage("Hi.")] * 3
        kept = trim_messages(history, max_tokens=20, token_counter=llm, strategy="last", start_on="human")
        assert kept and kept == history[-len(kept) :]
        # What no template shows is counted by itself.
        assert llm.get_num_tokens_from_messages([AIMessage("Hi.")]) == llm.get_num_tokens("Hi.") > 0


def test_what_a_template_passes_over_is_shown_elsewhere(tiny: LlamaForCausalLM, tokenizer: Any) -> None:
    users = copy.deepcopy(tokenizer)
    users.chat_template = (
        "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    with BlendEngine(tiny, users, **engine_settings(self_check=False)) as engine:
        llm = ChatBlend(engine=engine)
        for told in (SystemMessage("Be brief."), ChatMessage("Be brief.", role="developer")):
            assert llm.blend_prompt([told, HumanMessage("Where?")]).segments == ["[user]Be brief.\n\nWhere?"]
        for found in (ToolMessage("At sea.", tool_call_id="1"), FunctionMessage("At sea.", name="look")):
            assert llm.blend_prompt([HumanMessage("Where?"), found]).segments == ["[user]Where?\n\nAt sea."]
        with pytest.raises(PromptError, match="does not show the critic message 'Bad'"):
            llm.blend_prompt([HumanMessage("Where?"), ChatMessage("Bad", role="critic")])
        titles = {"At noon.": "Winter timetable", "Never.": None}
        documents = [Document(text, metadata={"title": title}) for text, title in titles.items()]
        prompt = llm.blend_prompt("When?", documents=documents)
        noon, never = (segment for segment in prompt.segments if isinstance(segment, Chunk))
        assert prompt.segments == ["[user]Winter timetable\n", noon, "\n\n", never, "\n\nWhen?"]
        assert (noon.text, never.text) == ("At noon.", "Never.")


def test_chat_needs_a_chat_template(tiny: LlamaForCausalLM, tokenizer: Any) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with BlendEngine(tiny, bare, **engine_settings(self_check=False)) as engine:
        with pytest.raises(ConfigError, match="chat template"):
            ChatBlend(engine=engine).invoke("hello")
        tokenizer_error = "{{ raise_exception('only users here') }}"
        bare.chat_template = tokenizer_error
        with pytest.raises(PromptError, match="only users here"):
            ChatBlend(engine=engine).invoke("hello")
        bare.chat_template = "{{ messages[0]['content'][:5] }}"
        with pytest.raises(PromptError, match="drops or changes"):
            ChatBlend(engine=engine).invoke([HumanMessage(documents_to_blocks([Document("a text")]))])


@KINDS
def test_errors_of_the_engine_come_through(kind: Any, engine: BlendEngine) -> None:
    llm = kind(engine=engine)
    for ask in (llm.invoke, lambda text: list(llm.stream(text)), lambda text: asyncio.run(llm.ainvoke(text))):
        with pytest.raises(CacheBlendError, match="window"):
            ask("word " * 3000)


def test_a_model_by_its_folder(tiny: LlamaForCausalLM, tokenizer: Any, tmp_path: Any) -> None:
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    blend = BlendConfig(recompute_ratio=0.3)
    llm = BlendLLM(model=tmp_path / "model", blend_config=blend, store=tmp_path / "kv", max_tokens=3)
    assert llm.engine.blend.recompute_ratio == 0.3
    assert llm.invoke("Hello there")
    llm.engine.close()
    assert (tmp_path / "kv").is_dir()


@KINDS
def test_a_copy_shares_the_engine_and_none_is_sent_elsewhere(kind: Any, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=4, generation_kwargs={"repetition_penalty": 1.1})
    copied = copy.deepcopy(llm)
    assert copied.engine is engine and text_of(copied.invoke("Who?")) == text_of(llm.invoke("Who?"))
    copied.generation_kwargs["repetition_penalty"] = 2.0
    assert llm.generation_kwargs == {"repetition_penalty": 1.1}
    with pytest.raises(ConfigError, match="write it down with"):
        pickle.dumps(llm)
