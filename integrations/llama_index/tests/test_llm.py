import asyncio
import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import CitableBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.prompts import PromptTemplate
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, QuantoConfig

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, CacheBlendError, Chunk
from cacheblend_rag.errors import ConfigError, PromptError
from integrations.langchain.tests.asking import TOOL_TEMPLATE
from integrations.llama_index.tests.conftest import MakeLLM, own_answer
from llama_index_cacheblend import BlendLLM
from llama_index_cacheblend.messages import render_messages
from tests import poison
from tests.families import tiny_reader

MESSAGES = [ChatMessage("Be brief.", role="system"), ChatMessage("Where was Mara born?")]


def test_complete_is_the_models_own_generate(llm: BlendLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [tokenizer.bos_token_id, *tokenizer("Mara was born in", add_special_tokens=False)["input_ids"]]
    response = llm.complete("Mara was born in")
    assert response.raw["token_ids"] == own_answer(llm, ids)
    assert response.text == tokenizer.decode(response.raw["token_ids"], skip_special_tokens=True)
    assert response.raw["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 12, "total_tokens": len(ids) + 12}


def test_chat_has_exactly_one_bos(llm: BlendLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = [{"role": m.role.value, "content": m.content} for m in MESSAGES]
    ids = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    response = llm.chat(MESSAGES)
    assert response.raw["token_ids"] == own_answer(llm, ids)
    assert response.raw["usage"]["prompt_tokens"] == len(ids)
    assert response.message.role == MessageRole.ASSISTANT


def test_streams_say_what_the_whole_answer_says(llm: BlendLLM) -> None:
    whole = llm.complete("Mara was born in", stop="\n")
    pieces = list(llm.stream_complete("Mara was born in", stop="\n"))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == whole.text
    assert pieces[-1].raw["token_ids"] == whole.raw["token_ids"]
    answer = llm.chat(MESSAGES)
    replies = list(llm.stream_chat(MESSAGES))
    assert "".join(reply.delta for reply in replies) == replies[-1].message.content == answer.message.content
    assert replies[-1].raw["usage"] == answer.raw["usage"]


async def test_async_forms_say_what_the_others_say(llm: BlendLLM) -> None:
    assert (await llm.acomplete("Mara")).raw["token_ids"] == llm.complete("Mara").raw["token_ids"]
    assert (await llm.achat(MESSAGES)).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
    pieces = [piece async for piece in await llm.astream_complete("Mara")]
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == llm.complete("Mara").text
    replies = [reply async for reply in await llm.astream_chat(MESSAGES)]
    assert replies[-1].raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]


def test_stop_strings_end_the_answer_and_are_not_in_it(make_llm: MakeLLM) -> None:
    llm = make_llm(max_new_tokens=30)
    text = llm.complete("Mara was born in").text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = text[: text.index(stop)]
    response = llm.complete("Mara was born in", stop=[stop])
    assert response.text == cut
    assert response.raw["usage"]["completion_tokens"] < 30
    assert "".join(piece.delta for piece in llm.stream_complete("Mara was born in", stop=[stop])) == cut
    assert make_llm(max_new_tokens=30, stop=stop).complete("Mara was born in").text == cut


def test_options_of_a_call_win(make_llm: MakeLLM) -> None:
    llm = make_llm(temperature=0.8, generation_kwargs={"top_k": 5})
    torch.manual_seed(1)
    sampled = {tuple(llm.complete("Mara").raw["token_ids"]) for _ in range(4)}
    assert len(sampled) > 1
    assert llm.complete("Mara", temperature=0, max_new_tokens=3).raw["usage"]["completion_tokens"] == 3
    assert len({tuple(llm.complete("Mara", temperature=0).raw["token_ids"]) for _ in range(3)}) == 1


def test_blend_prompt_and_config_of_a_call(make_llm: MakeLLM) -> None:
    llm = make_llm(recompute_ratio=0.2)
    llm.engine.add([Chunk(id="a", text="Mara Lindell was born in Oslo."), Chunk(id="b", text="She works as a baker.")])
    prompt = BlendPrompt("Facts:\n", ["a", "b"], "\nWhere was Mara born?", separator="\n")
    report = llm.complete("shown to callbacks", blend_prompt=prompt).raw["blend"]
    assert report["hits"] == 2
    assert report["recompute_ratio"] == 0.2
    blend = llm.engine.blend.replace(recompute_ratio=0.5)
    assert llm.chat(MESSAGES, blend_prompt=prompt, blend_config=blend).raw["blend"]["recompute_ratio"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either a model"),
        ({"model": "reference", "engine": "theirs"}, "either a model"),
        ({"engine": "reference"}, "engine='reference' is a str"),
        ({"model_name": "reference"}, r"BlendLLM\(model='reference'\)"),
        ({"engine": "theirs", "store": "folder"}, "store belongs to the engine"),
        ({"engine": "theirs", "blend_config": BlendConfig()}, "or to BlendSynthesizer for its questions alone"),
        ({"model": "reference", "tokenizer": object()}, "brings its own tokenizer"),
        ({"model": object()}, "give its tokenizer"),
        ({"engine": "theirs", "temperature": float("nan")}, "temperature=nan"),
        ({"engine": "theirs", "temperature": -1}, "temperature=-1"),
        ({"engine": "theirs", "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"engine": "theirs", "stop": ["a", ""]}, "non-empty"),
    ],
)
def test_bad_arguments(llm: BlendLLM, arguments: dict[str, Any], said: str) -> None:
    if arguments.get("engine") == "theirs":
        arguments = arguments | {"engine": llm.engine}
    with pytest.raises(ConfigError, match=said):
        BlendLLM(**arguments)


def test_bad_options_of_a_call(llm: BlendLLM) -> None:
    for options in ({"temperature": -0.1}, {"max_new_tokens": 1.5}, {"stop": [3]}, {"num_beams": 4}):
        with pytest.raises(ConfigError):
            llm.complete("Mara", **options)


HUGGING_FACE = {
    "tokenizer_name": ("reference", "the model brings its tokenizer"),
    "tokenizer_kwargs": ({"max_length": 64}, "the model brings its tokenizer"),
    "tokenizer_outputs_to_remove": (["token_type_ids"], "gives the model what it takes"),
    "device_map": ("auto", r"give model_kwargs=\{'device_map': ...\}"),
    "context_window": (4096, "the model's own is used"),
    "generate_kwargs": ({"top_k": 5}, "give generation_kwargs"),
    "max_tokens": (64, "give max_new_tokens"),
    "stopping_ids": ([2], "give generation_kwargs="),
    "query_wrapper_prompt": ("<{query_str}>", "give completion_to_prompt"),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_arguments_of_other_models_are_answered_with_ours(llm: BlendLLM, name: str) -> None:
    value, said = HUGGING_FACE[name]
    with pytest.raises(ConfigError, match=rf"no {name} \(.*{said}"):
        BlendLLM(engine=llm.engine, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"no {name} \(.*{said}"):
        llm.complete("Mara", **{name: value})


def test_all_arguments_that_there_are_not_are_said_at_once(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match=r"BlendLLM\(model='a/b'\) .*no tokenizer_name .*, no device_map"):
        BlendLLM(model_name="a/b", tokenizer_name="a/b", device_map="auto")
    with pytest.raises(ConfigError, match=r"no temprature .*go into generation_kwargs.*did you mean temperature"):
        BlendLLM(engine=llm.engine, temprature=1.0)


def test_ready_made_objects(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, llm: BlendLLM) -> None:
    own = BlendLLM(model, tokenizer=tokenizer, blend_config=BlendConfig(recompute_ratio=1.0), max_new_tokens=12)
    assert own.engine.blend.recompute_ratio == 1.0
    assert own.chat(MESSAGES).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
    own.engine.close()


def test_a_model_is_shared_and_never_copied(llm: BlendLLM) -> None:
    assert BlendLLM(engine=llm).engine is llm.engine
    with pytest.raises(ConfigError, match="holds the model"):
        pickle.dumps(llm)
    llm.stop = ["."]
    for copied in (copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert copied.engine is llm.engine
        assert copied.chat(MESSAGES).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
        copied.stop.append("!")
        copied.temperature = 0.5
    assert (llm.stop, llm.temperature) == (["."], 0.0)


def test_loading(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, llm: BlendLLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"device_map": {"": "cpu"}, "attn_implementation": "eager", "dtype": torch.float32}
    loaded = BlendLLM(tmp_path, model_kwargs=options, max_new_tokens=12)
    assert loaded.engine.model.config._attn_implementation == "eager"
    assert loaded.metadata.model_name == str(tmp_path)
    assert loaded.chat(MESSAGES).raw["token_ids"] == llm.chat(MESSAGES).raw["token_ids"]
    loaded.engine.close()
    with pytest.raises((RuntimeError, ConfigError), match="nowhere"):
        BlendLLM(tmp_path, model_kwargs={"device_map": "nowhere"})
    # Without the package it needs, a quantised model cannot be loaded; that it is missed shows that the option arrived.
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*quanto"):
        BlendLLM(tmp_path, model_kwargs={"quantization_config": QuantoConfig(weights="int8")})


def test_the_prompt_is_given_once(llm: BlendLLM) -> None:
    said = llm.complete("Mara").text
    assert llm.complete(prompt="Mara").text == said
    assert "".join(piece.delta for piece in llm.stream_complete(prompt="Mara")) == said
    for call in (llm.complete, llm.stream_complete):
        with pytest.raises(TypeError):
            call("Mara", prompt="Mara")
        with pytest.raises(ValueError, match="prompt"):
            call()


def test_images_are_refused(llm: BlendLLM) -> None:
    message = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(url="http://localhost/x.png")])
    with pytest.raises(PromptError, match="ImageBlock"):
        llm.chat([message])


def test_text_to_be_cited_and_calls_of_tools_are_shown(llm: BlendLLM, tokenizer: PreTrainedTokenizerFast) -> None:
    cited = CitableBlock(title="Born", source="s", content=[TextBlock(text="Mara was born in Oslo.")])
    shown = llm.messages_to_prompt([ChatMessage(blocks=[cited, TextBlock(text="Where?")])])
    assert "Born\nMara was born in Oslo.\nWhere?" in shown
    knows = copy.deepcopy(tokenizer)
    knows.chat_template = TOOL_TEMPLATE
    block = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs='{"at": "sea"}')
    function = {"name": "look", "arguments": '{"at": "sea"}'}
    kept: list[Any] = [{"type": "function", "id": "1", "function": function}]
    kept += [{"type": "tool_use", "name": "look", "input": {"at": "sea"}}]
    answers = [ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), block])]
    answers += [ChatMessage("", role="assistant", additional_kwargs={"tool_calls": [call]}) for call in kept]
    for answer in answers:
        found = ChatMessage("A ship.", role="tool", additional_kwargs={"tool_call_id": "1"})
        said = [ChatMessage("Who?"), answer, found]
        text = render_messages(knows, said)
        assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>' in text
        assert "<tool_response>\nA ship.\n</tool_response>" in text and "hm" not in text
        # The reference model's own template has no tools.
        assert '{"name": "look", "arguments": {"at": "sea"}}' in llm.messages_to_prompt(said)
    with pytest.raises(PromptError, match="has no name"):
        render_messages(knows, [ChatMessage("", role="assistant", additional_kwargs={"tool_calls": [{"id": "1"}]})])


@pytest.mark.parametrize("refused", ["system", "second system"])
def test_templates_without_system_messages_get_them_elsewhere(tokenizer: PreTrainedTokenizerFast, refused: str) -> None:
    picky = copy.deepcopy(tokenizer)
    condition = "m['role'] == 'system'" + (" and not loop.first" if refused == "second system" else "")
    picky.chat_template = (
        f"{{% for m in messages %}}{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    )
    two = [MESSAGES[0], ChatMessage(role=MessageRole.SYSTEM, content="Be kind."), MESSAGES[1]]
    text = render_messages(picky, two)
    if refused == "system":
        assert text == "[user]Be brief.\n\nBe kind.\n\nWhere was Mara born?"
    else:
        assert text == "[system]Be brief.\n\nBe kind.[user]Where was Mara born?"
    picky.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(PromptError, match=r"refuses messages.*never"):
        render_messages(picky, two)


def test_without_a_chat_template_text_is_sent(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    llm = BlendLLM(model, tokenizer=plain, max_new_tokens=4, system_prompt="Be brief.")
    assert not llm.metadata.is_chat_model
    text, messages = llm.render(PromptTemplate("Where was {name} born?"), name="Mara")
    assert text == "Be brief.\n\nWhere was Mara born?"
    assert messages is None
    assert llm.chat(MESSAGES).raw["usage"]["completion_tokens"] == 4
    llm.engine.close()


class Gate:
    """Lets a model compute only while it is open."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.open = threading.Event()
        self.passes = 0
        self._hook = model.register_forward_pre_hook(self._pass)

    def _pass(self, *args: Any) -> None:
        self.passes += 1
        assert self.open.wait(20)

    def remove(self) -> None:
        self.open.set()
        self._hook.remove()


@pytest.fixture
def gate(model: LlamaForCausalLM) -> Any:
    gate = Gate(model)
    yield gate
    gate.remove()


async def test_cancelling_ends_the_generation_and_leaves_others_alone(make_llm: MakeLLM, gate: Gate) -> None:
    llm = make_llm(max_new_tokens=600)
    task = asyncio.ensure_future(llm.achat(MESSAGES))
    while not gate.passes:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open.set()
    assert (await llm.achat(MESSAGES, max_new_tokens=4)).raw["usage"]["completion_tokens"] == 4
    assert gate.passes < 50


def test_errors_of_a_stream_are_raised(llm: BlendLLM) -> None:
    with pytest.raises(CacheBlendError, match="window"):
        llm.stream_complete("word " * 2000)


@poison.COUNTS
async def test_nobody_is_hurt_by_what_another_asks(count: int) -> None:
    tokenizer = poison.spare_token(load_tokenizer())
    with BlendEngine(tiny_reader(), tokenizer, **engine_settings(self_check=False)) as engine:
        llm = BlendLLM(engine=engine, max_new_tokens=6)
        questions = ["Where was Mara born?", "What does she do?", "Who paints ships?"]
        wanted = {each: llm.chat([ChatMessage(each)]).message.content for each in questions}
        bad = [*poison.TEXTS.values(), "Why # of all?"]
        asked = [bad[n // 8 % 4] if n % 8 == 3 else questions[n % 3] for n in range(count)]
        with poison.failing_on(engine.model, engine.tokenizer("#")["input_ids"][-1]):
            calls = [llm.achat([ChatMessage(each)]) for each in asked]
            given_up = [asyncio.create_task(llm.achat([ChatMessage(questions[0])])) for _ in range(4)]
            made = asyncio.gather(*calls, return_exceptions=True)
            await asyncio.sleep(0.05)
            for each in given_up:
                each.cancel()
            answers = await made
        for text, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                assert text in bad, answer
            else:
                assert answer.message.content == wanted[text]
