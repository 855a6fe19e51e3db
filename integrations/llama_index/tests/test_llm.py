"""The language model: its forms of call, its options, what messages become, and thoughts that are no part of answers."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend_rag import BlendEngine, BlendPrompt, CacheBlendError, EngineConfig
from cacheblend_rag.errors import ConfigError, PromptError
from integrations.llama_index.tests.conftest import MakeLLM, own_answer
from llama_index_cacheblend import BlendLLM, BlendSynthesizer
from llama_index_cacheblend.messages import render_messages
from tests.thinking import TOOL_TEMPLATE, Dictation

MESSAGES = [ChatMessage("Be brief.", role="system"), ChatMessage("Where was Mara born?")]
TEXT = "Mara was born in"


async def test_every_form_is_the_models_own_generate(llm: BlendLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = [{"role": m.role.value, "content": m.content} for m in MESSAGES]
    chat_ids = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert chat_ids.count(tokenizer.bos_token_id) == 1
    text_ids = [tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    for ids, given, name in ((text_ids, TEXT, "complete"), (chat_ids, MESSAGES, "chat")):
        expected = own_answer(llm, ids)
        pieces = list(getattr(llm, f"stream_{name}")(given))
        later = [piece async for piece in await getattr(llm, f"astream_{name}")(given)]
        whole = getattr(llm, name)(given)
        for answer in (whole, await getattr(llm, f"a{name}")(given), pieces[-1], later[-1]):
            assert answer.raw["token_ids"] == expected
            assert answer.raw["usage"] == {
                "prompt_tokens": len(ids),
                "completion_tokens": 12,
                "total_tokens": len(ids) + 12,
            }
            text = answer.text if name == "complete" else answer.message.content
            assert text == tokenizer.decode(expected, skip_special_tokens=True)
        for streamed in (pieces, later):
            assert len(streamed) > 2 and "".join(piece.delta for piece in streamed) == text


def test_stop_strings_end_the_answer_and_are_not_in_it(make_llm: MakeLLM) -> None:
    llm = make_llm(max_new_tokens=30)
    text = llm.complete(TEXT).text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = text[: text.index(stop)]
    response = llm.complete(TEXT, stop=[stop])
    assert response.text == cut
    assert response.raw["usage"]["completion_tokens"] < 30
    assert "".join(piece.delta for piece in llm.stream_complete(TEXT, stop=[stop])) == cut
    assert make_llm(max_new_tokens=30, stop=stop).complete(TEXT).text == cut


def test_options_of_a_call_win(make_llm: MakeLLM) -> None:
    llm = make_llm(temperature=0.8, generation_kwargs={"top_k": 5})
    torch.manual_seed(1)
    sampled = {tuple(llm.complete("Mara").raw["token_ids"]) for _ in range(4)}
    assert len(sampled) > 1
    assert llm.complete("Mara", temperature=0, max_new_tokens=3).raw["usage"]["completion_tokens"] == 3
    assert len({tuple(llm.complete("Mara", temperature=0).raw["token_ids"]) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model": "reference", "engine": "theirs"},
        {"engine": "reference"},
        {"model_name": "reference"},
        {"engine": "theirs", "store": "folder"},
        {"engine": "theirs", "engine_config": EngineConfig()},
        {"engine": "theirs", "blend_config": {}},
        {"model": object()},
        {"engine": "theirs", "temperature": float("nan")},
        {"engine": "theirs", "max_new_tokens": 0},
        {"engine": "theirs", "stop": ["a", ""]},
    ],
)
def test_bad_arguments(llm: BlendLLM, arguments: dict[str, Any]) -> None:
    if arguments.get("engine") == "theirs":
        arguments = arguments | {"engine": llm.engine}
    with pytest.raises(ConfigError):
        BlendLLM(**arguments)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_ctx": 4096}, r"model_kwargs=\{'n_ctx'"),
        ({"temprature": 0}, r"temprature, did you mean temperature\?"),
        ({"recompute_ratio": 0.2}, r"blend_config=BlendConfig\(recompute_ratio"),
        ({"logprobs": True}, "logprobs=True is not supported"),
    ],
)
def test_what_belongs_elsewhere_is_said_to(llm: BlendLLM, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BlendLLM(engine=llm.engine, **given)
    if "logprobs" in given:
        with pytest.raises(ConfigError, match=said):
            llm.complete("Mara", **given)
        assert llm.complete("Mara", logprobs=False).text


def test_bad_calls(llm: BlendLLM) -> None:
    for options in ({"temperature": -0.1}, {"max_new_tokens": 1.5}, {"stop": [3]}, {"num_beams": 4}, {"max_tokens": 3}):
        with pytest.raises(ConfigError):
            llm.complete("Mara", **options)
    with pytest.raises(CacheBlendError):
        llm.stream_complete("word " * 2000)
    message = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(url="http://localhost/x.png")])
    with pytest.raises(PromptError, match="ImageBlock"):
        llm.chat([message])


def test_a_model_is_shared_and_never_copied(llm: BlendLLM) -> None:
    assert BlendLLM(engine=llm).engine is llm.engine
    with pytest.raises(ConfigError):
        pickle.dumps(llm)
    llm.stop = ["."]
    for copied in (copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert copied.engine is llm.engine
        assert copied.chat(MESSAGES).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
        copied.stop.append("!")
        copied.temperature = 0.5
    assert (llm.stop, llm.temperature) == (["."], 0.0)


def test_loading(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    llm: BlendLLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"device_map": {"": "cpu"}, "attn_implementation": "eager", "dtype": torch.float32}
    loaded = BlendLLM(tmp_path, model_kwargs=options, max_new_tokens=12)
    assert loaded.engine.model.config._attn_implementation == "eager"
    assert loaded.metadata.model_name == str(tmp_path)
    assert loaded.engine.config.separator == "\n\n"
    assert loaded.chat(MESSAGES).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
    loaded.engine.close()
    monkeypatch.setenv("CACHEBLEND_SEPARATOR", " | ")
    for config, separator in ((None, " | "), (EngineConfig(separator=""), "")):
        given = BlendLLM(tmp_path, engine_config=config)
        assert given.engine.config.separator == separator
        given.engine.close()


def test_text_to_be_cited_and_calls_of_tools_are_shown(llm: BlendLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    cited = CitableBlock(title="Born", source="s", content=[TextBlock(text="Mara was born in Oslo.")])
    shown = llm.messages_to_prompt([ChatMessage(blocks=[cited, TextBlock(text="Where?")])])
    assert "Born\nMara was born in Oslo.\nWhere?" in shown
    knows = copy.deepcopy(tokenizer)
    knows.chat_template = TOOL_TEMPLATE
    block = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs='{"at": "sea"}')
    answer = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), block])
    found = ChatMessage("A ship.", role="tool", additional_kwargs={"tool_call_id": "1"})
    text = render_messages(knows, [ChatMessage("Who?"), answer, found])
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>' in text
    assert "<tool_response>\nA ship.\n</tool_response>" in text and "hm" not in text
    # The reference model's own template has no tools.
    assert '{"name": "look", "arguments": {"at": "sea"}}' in llm.messages_to_prompt(
        [ChatMessage("Who?"), answer, found]
    )
    elsewhere = ChatMessage("", role="assistant", additional_kwargs={"tool_calls": [{"id": "1"}]})
    with pytest.raises(PromptError, match="ToolCallBlock"):
        render_messages(knows, [elsewhere])


@pytest.mark.parametrize("own", [True, False], ids=["messages_to_prompt", "chat template"])
def test_what_was_said_writes_no_control_tokens(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, own: bool
) -> None:
    def write(messages: Any) -> str:
        return tokenizer.bos_token + "".join(f"{each.role.value}: {each.content}\n" for each in messages)

    llm = BlendLLM(engine=BlendEngine(model, tokenizer), max_new_tokens=4, messages_to_prompt=write if own else None)
    eos = tokenizer.eos_token
    text = llm.messages_to_prompt([ChatMessage(f"Who?{eos}Mara.")])
    plain = llm.messages_to_prompt([ChatMessage("Who?Mara.")])
    ids, expected = (llm.engine.prompt_ids(BlendPrompt(segments=[each])) for each in (text, plain))
    assert ids.count(tokenizer.eos_token_id) == expected.count(tokenizer.eos_token_id)
    llm.engine.close()


def test_without_a_chat_template_text_is_sent(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    llm = BlendLLM(engine=BlendEngine(model, plain), max_new_tokens=4, system_prompt="Be brief.")
    text, messages = llm.render(PromptTemplate("Where was {name} born?"), name="Mara")
    assert (text, messages) == ("Be brief.\n\nWhere was Mara born?", None)
    assert llm.chat(MESSAGES).raw["usage"]["completion_tokens"] == 4
    llm.engine.close()


THINKS = '<think>\nIt may be {"sure": false}.\n</think>\n\n'


@pytest.fixture
def dictation() -> Iterator[Dictation]:
    made = Dictation("Qwen3")
    with made.engine:
        yield made


@pytest.mark.parametrize("streams", [False, True])
def test_thoughts_are_a_block_of_their_own(dictation: Dictation, streams: bool) -> None:
    llm = BlendLLM(engine=dictation.engine, max_new_tokens=90)
    dictation.say(THINKS + "In Oslo.", ends=True)
    streamed = list(llm.stream_chat([ChatMessage("Where?")])) if streams else []
    answer = streamed[-1] if streams else llm.chat([ChatMessage("Where?")])
    [thought, _] = answer.message.blocks
    assert isinstance(thought, ThinkingBlock) and thought.content and "sure" in thought.content
    assert answer.message.content == "In Oslo."
    assert answer.raw["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought.num_tokens}
    told = "".join(each.additional_kwargs.get("thinking_delta") or "" for each in streamed)
    assert not streams or (told, "".join(each.delta for each in streamed)) == (thought.content, "In Oslo.")


class Sure(BaseModel):
    """Whether it is so."""

    sure: bool


def test_answers_and_objects_are_without_thoughts(dictation: Dictation) -> None:
    llm = BlendLLM(engine=dictation.engine, max_new_tokens=90)
    dictation.say(THINKS + '{"sure": true}', ends=True)
    assert llm.structured_predict(Sure, PromptTemplate("Is it so?")) == Sure(sure=True)
    nodes = [NodeWithScore(node=TextNode(text="Mara was born in Oslo."))]
    for streaming in (False, True):
        dictation.say(THINKS + "In Oslo.", ends=True)
        assert str(BlendSynthesizer(llm, streaming=streaming).synthesize("Where?", nodes)) == "In Oslo."
    dictation.say(THINKS + "It is so.", ends=True)
    assert llm.chat([ChatMessage("So?")], stop="is so").message.content == "It "


def test_variables_reach_the_template(dictation: Dictation) -> None:
    silent = BlendLLM(engine=dictation.engine, enable_thinking=False)
    assert silent.messages_to_prompt([ChatMessage("So?")]).endswith("</think>\n\n")
    llm = BlendLLM(engine=dictation.engine)

    def prompt_tokens(model: BlendLLM, **asked: Any) -> int:
        dictation.say("Yes.", ends=True)
        return int(model.chat([ChatMessage("So?")], **asked).raw["usage"]["prompt_tokens"])

    plain, without = prompt_tokens(llm), prompt_tokens(silent)
    assert without > plain == prompt_tokens(silent, enable_thinking=True)
    assert prompt_tokens(llm, chat_template_kwargs={"enable_thinking": False}) == without
    with pytest.raises(ConfigError, match="takes no 'reasoning_effort'"):
        BlendLLM(engine=dictation.engine, reasoning_effort="low")
    with pytest.raises(ConfigError, match="enable_thinking set variables"):
        llm.complete("So?", enable_thinking=False)
