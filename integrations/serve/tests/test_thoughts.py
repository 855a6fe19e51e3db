"""What a model thinks is apart from its answer over HTTP, for OpenAI's clients and for the engine that asks a server."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cacheblend_rag import BlendPrompt
from cacheblend_rag.chat.answer import Ending
from cacheblend_rag.lexer import lexer_of
from cacheblend_serve.client.engine import ServedEngine
from integrations.serve.tests.conftest import Serve
from integrations.serve.tests.test_answers import ask, events
from tests.thinking import Dictation

THINKS = "<think>\nIt rains.\n</think>\n\n"


@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_pays_for_what_the_template_changes_and_for_what_is_new(serve: Serve, streams: bool) -> None:
    dictation = Dictation("Qwen3", prefix_bytes=2**26)
    with dictation.engine:
        client = serve(dictation.engine)

        def spoken(turns: list[dict[str, Any]], tokens: int) -> tuple[str, str, int]:
            # Another name for each turn makes no difference.
            body = {"messages": turns, "max_tokens": tokens, "report": True, "prompt_cache_key": f"turn {len(turns)}"}
            if streams:
                *pieces, whole = events(client, temperature=0, **body)
                deltas = [ChatCompletionChunk.model_validate(piece).choices[0].delta for piece in pieces]
                thoughts = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
                words = "".join(delta.content or "" for delta in deltas)
            else:
                whole = ask(client, **body)
                message: Any = ChatCompletion.model_validate(whole).choices[0].message
                thoughts, words = message.reasoning_content, message.content
            assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
            return thoughts, words, whole["blend"][0]["prefix_tokens"]

        dictation.holds_six_turns(spoken)


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss"])
def test_the_engine_that_asks_a_server_tells_them_apart(serve: Serve, name: str) -> None:
    dictation = Dictation(name, prefix_bytes=2**26)
    says = (
        THINKS
        if name == "Qwen3"
        else "<|channel|>analysis<|message|>It rains.<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    with dictation.engine, ServedEngine(str(serve(dictation.engine).base_url)) as served:
        text = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
        thinking = lexer_of(served.tokenizer).thinking([text])
        ending = Ending(("ai",), None, thinking)
        counts = []
        for _ in range(2):
            dictation.say(f"{says}It paints.", ends=True)
            criteria = ending.criteria(served.tokenizer)
            result = served.generate(BlendPrompt(segments=[text]), 60, stopping_criteria=criteria)
            answer = ending.read(result)
            assert (answer.thoughts, answer.text, answer.finish_reason) == ("It rains.", "It p", "stop")
            counts.append(answer.report.prefix_tokens)
        assert counts[0] == 0 < counts[1]
