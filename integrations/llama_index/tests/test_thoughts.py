"""What a model thinks is a block of its own in LlamaIndex's messages, and no part of what engines of queries and chats answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend import BlendLLM, BlendSynthesizer
from tests.thinking import Dictation

THINKS = '<think>\nIt may be {"sure": false}.\n</think>\n\n'


@pytest.fixture
def dictation() -> Iterator[Dictation]:
    made = Dictation("Qwen3")
    with made.engine:
        yield made


def as_message(turn: dict[str, Any]) -> ChatMessage:
    message = ChatMessage(turn["content"], role=turn["role"])
    if "reasoning_content" in turn:
        message.blocks.insert(0, ThinkingBlock(content=turn["reasoning_content"]))
    return message


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_pays_for_what_the_template_changes_and_for_what_is_new(streams: bool) -> None:
    dictation = Dictation("Qwen3", prefix_bytes=2**26)
    llm = BlendLLM(engine=dictation.engine)

    def ask(turns: list[dict[str, Any]], tokens: int) -> tuple[str, str, int]:
        messages, streamed = list(map(as_message, turns)), []
        if streams:
            streamed = list(llm.stream_chat(messages, max_new_tokens=tokens))
            answer = streamed[-1]
            assert "".join(each.delta for each in streamed) == answer.message.content
        else:
            answer = llm.chat(messages, max_new_tokens=tokens)
        [thought, _] = answer.message.blocks
        assert isinstance(thought, ThinkingBlock) and thought.content
        told = [each.additional_kwargs.get("thinking_delta") or "" for each in streamed]
        assert not streamed or "".join(told) == thought.content
        details = answer.raw["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": thought.num_tokens}
        return thought.content, answer.message.content or "", answer.raw["blend"]["prefix_tokens"]

    with dictation.engine:
        dictation.holds_six_turns(ask)


class Sure(BaseModel):
    """Whether it is so."""

    sure: bool


def test_answers_and_objects_are_without_thoughts(dictation: Dictation) -> None:
    llm = BlendLLM(engine=dictation.engine, max_new_tokens=90)
    dictation.say(THINKS + '{"sure": true}', ends=True)
    assert llm.structured_predict(Sure, PromptTemplate("Is it so?")) == Sure(sure=True)
    nodes = [NodeWithScore(node=TextNode(text="Mara was born in Oslo."))]
    dictation.say(THINKS + "In Oslo.", ends=True)
    assert str(BlendSynthesizer(llm).synthesize("Where?", nodes)) == "In Oslo."
    dictation.say(THINKS + "In Oslo.", ends=True)
    assert "".join(BlendSynthesizer(llm, streaming=True).synthesize("Where?", nodes).response_gen) == "In Oslo."
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
