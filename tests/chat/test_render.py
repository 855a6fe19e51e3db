"""What is said reaches the model, whatever its chat template does with roles: it is in the rendered text, or refused."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import Chunk
from cacheblend_rag.chat.render import Passage, apply_template, past_call, render_chat
from cacheblend_rag.errors import PromptError
from tests.thinking import QWEN3

# As the models of these names have them, but for what has nothing to do with roles.
TEMPLATES = {
    "reference": load_tokenizer().chat_template,
    "ChatML": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    "Mistral": (
        "{% set given = messages[1:] if messages[0].role == 'system' else messages %}{% set n = namespace(turn=0) %}"
        "{% for m in given %}{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (n.turn % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set n.turn = n.turn + 1 %}{% endif %}{% endfor %}<s>"
        "{% for m in given %}{% if m.role == 'user' %}{% if tools and loop.last %}{{ tools | tojson }}{% endif %}"
        "[INST] {% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids') }}"
        "{% endif %}{{ c.function | tojson }}{% endfor %}</s>{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content} | tojson }}{% else %}{{ raise_exception('roles') }}"
        "{% endif %}{% endfor %}"
    ),
    "Phi 3": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n<|assistant|>\n{% elif m.role =="
        " 'assistant' %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "<start_of_turn>model\n"
    ),
    "Qwen3": QWEN3,
}
ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function")


def tokenizer_of(name: str) -> Any:
    tokenizer = copy.copy(load_tokenizer())
    tokenizer.chat_template = TEMPLATES.get(name, name)
    return tokenizer


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns, each with words that no other has, some of them with a call."""
    turns: list[dict[str, Any]] = []
    for number, role in enumerate(draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=5))):
        words = draw(st.text('ab \n<>"é', max_size=8))
        turns.append({"role": role, "content": draw(st.sampled_from(["", f"{number}: {words}!"]))})
        if role == "assistant" and draw(st.booleans()):
            turns[-1]["tool_calls"] = [past_call(f"look_{number}", {"at": words}, "call_1")]
        if role in ("tool", "function"):
            turns[-1]["tool_call_id"] = "call_1"
    return turns


@settings(max_examples=200, deadline=None)
@given(conversations(), st.sampled_from([*TEMPLATES]))
def test_what_is_said_and_called_is_in_the_text_once(turns: list[dict[str, Any]], name: str) -> None:
    try:
        text = apply_template(tokenizer_of(name), turns)
    except PromptError:
        # Some templates want a user to speak first.
        speakers = [turn["role"] for turn in turns if turn["role"] not in ("system", "developer")]
        assert name in ("Mistral", "Gemma") and speakers[0] in ("assistant", "model")
        return
    for turn in turns:
        said = turn["content"]
        assert text.count(said) == 1 or text.count(json.dumps(said, ensure_ascii=False)) == 1 or not said
        for call in turn.get("tool_calls", ()):
            assert text.count(call["function"]["name"]) == 1


HELLO = {"role": "user", "content": "Hello."}


def test_words_that_the_template_has_too_are_not_taken_for_what_was_said() -> None:
    turns = [{"role": "system", "content": "user"}, HELLO]
    assert apply_template(tokenizer_of("Phi 3"), turns) == "<|user|>\nuser\n\nHello.<|end|>\n<|assistant|>\n"
    assert "user\nuser<|im_end|>" in apply_template(tokenizer_of("Qwen3"), [{"role": "user", "content": "user"}])


@pytest.mark.parametrize("change", ["[:20]", ".split('!')[0]", " | upper", "[-4:]"])
def test_a_template_that_changes_what_was_said_is_refused(change: str) -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content" + change + " }}{% endfor %}")
    with pytest.raises(PromptError, match="Hello! It is raining"):
        apply_template(tokenizer, [{"role": "user", "content": "Hello! It is raining in Oslo today."}])


def test_a_role_without_a_place_is_named() -> None:
    told = {"role": "critic", "content": "Bad"}
    with pytest.raises(PromptError, match="critic"):
        apply_template(tokenizer_of("Phi 3"), [HELLO, told])
    assert "<|im_start|>critic\nBad" in apply_template(tokenizer_of("ChatML"), [told])


CALL = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [past_call("look", '{"at": "sea"}', "toolu_0123456789")],
}
RESULT = {"role": "tool", "content": "A ship.", "tool_call_id": "toolu_0123456789"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_results_are_shown_as_the_template_does_or_as_words(name: str) -> None:
    text = apply_template(tokenizer_of(name), [HELLO, CALL, RESULT])
    places = [text.index(each) for each in ("Hello.", "I look.", "look", "sea", "A ship.")]
    assert places[:2] == sorted(places[:2]) and places[1] < places[3] < places[4]
    assert name != "Qwen3" or "<tool_call>" in text


SHOWS = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATES["ChatML"], SHOWS, SHOWS.replace("[{{", "[{{ d.title }}\n{{")])
def test_titles_of_documents_stand_before_their_chunks(template: str) -> None:
    sea, ship = Chunk("The sea.", "sea"), Chunk("A ship.", "ship")
    template = template if "messages" in template else template + TEMPLATES["ChatML"]
    parts = render_chat(
        tokenizer_of(template),
        [{"role": "user", "content": ["Who?"]}],
        documents=[Passage("Waters", sea), Passage("", ship)],
    )
    place = parts.index(sea)
    assert str(parts[place - 1]).endswith("Waters\n") and ship in parts
    assert "".join(part for part in parts if isinstance(part, str)).count("Waters") == 1
