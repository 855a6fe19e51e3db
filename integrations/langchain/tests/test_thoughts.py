"""What a model thinks is apart from its answer in LangChain's messages, and shown to it again as its template does."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from cacheblend_rag.errors import ConfigError
from langchain_cacheblend import ChatBlend
from tests.thinking import Dictation

THINKS = "<think>\nIt rains.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Oslo"}}\n</tool_call>'
LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


@pytest.fixture
def dictation() -> Iterator[Dictation]:
    made = Dictation("Qwen3", prefix_bytes=2**26)
    with made.engine:
        yield made


def as_messages(turns: list[dict[str, Any]]) -> list[BaseMessage]:
    kinds = {"user": HumanMessage, "assistant": AIMessage}
    return [
        kinds[turn["role"]](turn["content"], additional_kwargs={"reasoning_content": turn.get("reasoning_content")})
        for turn in turns
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_pays_for_what_the_template_changes_and_for_what_is_new(streams: bool, dictation: Dictation) -> None:
    llm = ChatBlend(engine=dictation.engine)

    def ask(turns: list[dict[str, Any]], tokens: int) -> tuple[str, str, int]:
        if streams:
            pieces = list(llm.stream(as_messages(turns), max_tokens=tokens))
            answer = sum(pieces[1:], pieces[0])
        else:
            answer = llm.invoke(as_messages(turns), max_tokens=tokens)
        [thought, *_] = answer.content_blocks
        assert thought["type"] == "reasoning"
        assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
        return thought["reasoning"], answer.content, answer.response_metadata["blend"]["prefix_tokens"]

    dictation.holds_six_turns(ask)


async def test_thoughts_are_no_calls_and_are_kept_while_calls_go_on(dictation: Dictation) -> None:
    llm = ChatBlend(engine=dictation.engine, max_tokens=300)
    bound, messages = llm.bind_tools([LOOK]), [HumanMessage("Is it raining in Oslo?")]
    says = f"<think>\n{CALL}\n</think>\n\n{CALL}"
    dictation.say(says, ends=True)
    answer = bound.invoke(messages)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("look", {"at": "Oslo"})]
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("", CALL)
    dictation.say(says, ends=True)
    pieces = [piece async for piece in bound.astream(messages)]
    whole = sum(pieces[1:], pieces[0])
    assert whole.additional_kwargs == answer.additional_kwargs and len(whole.tool_calls) == 1
    # Blocks of other classes say the same.
    messages += [answer, ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])]
    ids = dictation.engine.prompt_ids(llm.blend_prompt(messages, tools=[LOOK]))
    blocks = {
        "anthropic": {"type": "thinking", "thinking": CALL, "signature": "x"},
        "bedrock_converse": {"type": "reasoning_content", "reasoning_content": {"text": CALL, "signature": "x"}},
    }
    others = [
        AIMessage([block], tool_calls=answer.tool_calls, response_metadata={"model_provider": name})
        for name, block in blocks.items()
    ]
    for other in (*others, AIMessage(content_blocks=answer.content_blocks)):
        assert dictation.engine.prompt_ids(llm.blend_prompt([messages[0], other, messages[2]], tools=[LOOK])) == ids
    before = answer.usage_metadata
    dictation.say(THINKS + "Yes.", ends=True)
    last = bound.invoke(messages)
    # All that was generated, thoughts and call, but the token that ended it.
    assert last.response_metadata["blend"]["prefix_tokens"] >= before["total_tokens"] - 1
    dictation.say(THINKS, ends=True)
    after = bound.invoke([*messages, last, HumanMessage("And tomorrow?")])
    assert after.response_metadata["blend"]["prefix_tokens"] == before["input_tokens"]


def test_variables_reach_the_template_and_the_keys_of_caches(dictation: Dictation) -> None:
    llm = ChatBlend(engine=dictation.engine)

    def end(model: Any, **asked: Any) -> bool:
        return str(model.blend_prompt("Who?", **asked).segments[-1]).endswith("</think>\n\n")

    silent = ChatBlend(engine=dictation.engine, chat_template_kwargs={"enable_thinking": False})
    assert not end(llm) and end(silent) and end(ChatBlend(engine=dictation.engine, enable_thinking=False))
    assert end(llm, enable_thinking=False) and not end(silent, chat_template_kwargs={"enable_thinking": True})
    assert llm._get_llm_string() != silent._get_llm_string() != llm._get_llm_string(enable_thinking=False)
    dictation.say("Yes.", ends=True)
    assert llm.invoke("Who?", enable_thinking=False).content == "Yes."
    dictation.say(THINKS + "It stops.", ends=True)
    assert llm.invoke("Who?", stop=["t r", "st"]).content == "It "
    with pytest.raises(ConfigError):
        ChatBlend(engine=dictation.engine, chat_template_kwargs={"thinking": True})
    with pytest.raises(ConfigError):
        llm.invoke("Who?", reasoning_effort="low")
