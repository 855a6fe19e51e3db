"""What a model thinks is told from what it answers, however its template marks it and however the text comes."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.chat.answer import Ending
from cacheblend_rag.chat.catalog import ChunkCatalog
from cacheblend_rag.chat.grammar import Guide, after_thoughts, json_grammar
from cacheblend_rag.chat.render import apply_template, past_call, render_chat
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.stops import StopCutter, Thinking, Thought, cut_pieces
from tests.thinking import TEMPLATES, Dictation, tokenizer_of

CHANNELS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
CALL = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}"
# Of each template: the end of its prompt, an answer, its thoughts and its words.
CASES = {
    "Qwen3": ("assistant\n", "<think>\nHe \n\nsaid.\n</think>\n\nYes.\n", "He \n\nsaid.", "Yes.\n"),
    "no thoughts": ("</think>\n\n", "\nYes, <think> is a tag </think>.", "", "\nYes, <think> is a tag </think>."),
    "cut": ("", "<think>He said </thi", "He said </thi", ""),
    "begun": ("", "  <thi", "", "  <thi"),
    "open": ("<think>\n", "He said.</think>Yes.", "He said.", "Yes."),
    "gpt-oss": ("", CHANNELS.format("He said.", "Yes."), "He said.", "Yes."),
    "gpt-oss, plain": ("", "Yes.", "", "Yes."),
    "gpt-oss, cut": ("", CHANNELS.format("He said.", "Yes.")[:60], "He said.", ""),
    "gpt-oss, call": (
        "",
        CALL.format('{"at": 1}'),
        "Look.",
        '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
    ),
}


def parts_of(pieces: Any, cutter: StopCutter) -> tuple[str, str]:
    parts = list(cut_pieces(pieces, cutter))
    return tuple("".join(each for each in parts if isinstance(each, Thought) is kind) for kind in (True, False))  # type: ignore[return-value]


@cache
def lexer(name: str) -> Any:
    return lexer_of(tokenizer_of(name))


@settings(max_examples=300)
@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_thoughts_are_the_same_in_every_split(case: str, data: st.DataObject) -> None:
    end, text, thoughts, words = CASES[case]
    thinking = lexer("gpt-oss" if "gpt" in case else "Qwen3").thinking([Chunk("x"), end])
    assert thinking is not None
    assert thinking.apart(text) == (thoughts, words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts_of(pieces, StopCutter((), thinking)) == (thoughts, words)
    # A stop string counts in the words alone.
    assert parts_of(pieces, StopCutter(("s",), thinking)) == (thoughts, words.partition("s")[0])


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{{ m.content.split('</think>')[-1] }}", ("<think>", "</think>")),
        ("[THINK]{{ t }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("{{ m.content }} I think.", None),
    ],
)
def test_a_template_says_how_thoughts_are_marked(template: str, marks: Any) -> None:
    found = Thinking.of(template)
    assert marks == (None if found is None else (found.opens, found.closes))


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "And Oslo?"},
    {"role": "assistant", "content": "Rainy.", "reasoning_content": "Old <think>thoughts</think>."},
    {"role": "user", "content": "Rome?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "New.",
        "tool_calls": [past_call("look", {"at": "Rome"})],
    },
    {"role": "tool", "content": "Sunny."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_past_thoughts_are_shown_as_the_template_does(name: str) -> None:
    tokenizer = tokenizer_of(name)
    named = [{**turn, "thinking": turn.get("reasoning_content")} for turn in TURNS]
    if name != "DeepSeek-R1":  # which shows no calls
        wanted = tokenizer.apply_chat_template(named, tokenize=False, add_generation_prompt=True)
        assert apply_template(tokenizer, TURNS).replace("\ufdd0\ufdd1", "") == wanted
        assert "New." in wanted and "thoughts" not in wanted
    said = [
        turn | {"content": f"<think>\nHm.\n</think>\n\n{turn['content']}"} if n == 1 else turn
        for n, turn in enumerate(TURNS[:3])
    ]
    del said[1]["reasoning_content"]
    plain = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert name == "gpt-oss" or (apply_template(tokenizer, said) == plain and "Hm." not in plain)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_of_an_engine_are_told_apart(name: str) -> None:
    dictation = Dictation(name)
    engine, tokenizer = dictation.engine, dictation.tokenizer
    prompt = BlendPrompt(segments=render_chat(tokenizer, TURNS[:1]))
    thinking = lexer_of(tokenizer).thinking(prompt.segments)
    assert thinking is not None and thinking.is_open == (name == "DeepSeek-R1")
    text = {"Qwen3": "<think>\n{}\n</think>\n\n{}", "DeepSeek-R1": "{}\n</think>\n\n{}", "gpt-oss": CHANNELS}[name]
    ending = Ending(("a s",), None, thinking)
    size = dictation.say(text.format("It is a ship.", "It is a ship."), ends=True)
    stream = engine.stream(prompt, size + 9, stopping_criteria=ending.criteria(tokenizer))
    assert parts_of(stream, StopCutter(ending.stop, thinking)) == ("It is a ship.", "It is ")
    answer = ending.read(stream.result())
    assert (answer.text, answer.thoughts, answer.finish_reason) == ("It is ", "It is a ship.", "stop")
    assert answer.reasoning_tokens == len(tokenizer("It is a ship.", add_special_tokens=False)["input_ids"])
    assert answer.report.output_tokens < size
    engine.close()


@pytest.mark.parametrize(
    ("name", "says", "variables", "thoughts"),
    [
        ("DeepSeek-R1", 'It may be {"sure": 0}\n</think>', {}, 'It may be {"sure": 0}'),
        ("Qwen3", '<think>\nIt may be {"sure": 0}\n</think>\n\n', {}, 'It may be {"sure": 0}'),
        ("gpt-oss", CHANNELS.format('It may be {"sure": 0}', ""), {}, 'It may be {"sure": 0}'),
    ],
)
def test_a_form_comes_after_thoughts(name: str, says: str, variables: dict[str, Any], thoughts: str) -> None:
    dictation = Dictation(name)
    prompt = BlendPrompt(segments=render_chat(dictation.tokenizer, TURNS[:1], **variables))
    thinking = lexer_of(dictation.tokenizer).thinking(prompt.segments)
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    grammar = after_thoughts(json_grammar(schema), thinking)
    dictation.say(says)
    result = dictation.engine.generate(prompt, 60, logits_processor=[Guide(dictation.engine, grammar)])
    answer = Ending((), None, thinking).read(result)
    assert answer.thoughts == thoughts
    assert isinstance(json.loads(answer.text)["sure"], bool)
    dictation.engine.close()


def test_past_thoughts_are_not_searched_for_chunks() -> None:
    dictation = Dictation("Qwen3")
    text = "Mara Lind was born in Oslo and moved north when she was nine."
    chunk = Chunk(text, "mara")
    with dictation.engine as engine:
        engine.add([chunk])
        turns = [
            TURNS[2],
            TURNS[3] | {"reasoning_content": f"She said: {text}"},
            {"role": "tool", "content": f"{text} So."},
        ]
        prompt = ChunkCatalog().prompt(engine, render_chat(dictation.tokenizer, turns))
        assert [each.id for each in prompt.segments if isinstance(each, Chunk)] == ["mara"]
        assert text in str(prompt.segments[0]) and "<tool_response>" in str(prompt.segments[0])
