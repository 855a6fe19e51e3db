"""The words of chat templates around messages: templates of several kinds, and those that cannot be cut."""

from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from cacheblend_lab import reference
from cacheblend_pml import Import, Schema, SchemaLayout, Tokens, Turn, lay_out
from cacheblend_pml.chat import Message
from cacheblend_rag.errors import PMLError
from integrations.pml.tests.naive import tokenize

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (system if loop.first else '') + m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}<bos>"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
# Answers before the last question are worded unlike those behind it.
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant>"
)
TEMPLATES = {"chatml": CHATML, "llama 2": LLAMA_2, "gemma": GEMMA, "thinking": THINKING}
BOS_TEXT = {"llama 2": "<s>", "gemma": "<bos>"}


def renderer(template: str) -> Any:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)
    return lambda messages: compiled.render(messages=messages)


def tokens_of(name: str) -> Tokens:
    text = BOS_TEXT.get(name, "")
    return Tokens(tokenize, 0, tokenize(text), text, renderer(TEMPLATES[name]))


def said(schema: Schema, tokens: Tokens, *parts: Any) -> str:
    return "".join(map(chr, lay_out(SchemaLayout(schema, tokens), schema.prompt(*parts)).token_ids))


SCHEMA = Schema.from_text(
    """<schema name="s">
  <system>Be brief.</system>
  <user>Read: <module name="a">AAA</module><module name="b">BBB</module></user>
  <assistant>Done.</assistant>
</schema>"""
)


def messages(content: str, *more: Message) -> list[Message]:
    first = [("system", "Be brief."), ("user", content), ("assistant", "Done.")]
    return [*({"role": role, "content": text} for role, text in first), *more]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_reads_as_the_template_writes_it(name: str) -> None:
    tokens = tokens_of(name)
    chat = messages("Read: AAABBB", {"role": "user", "content": "Why?"})
    if name == "gemma":
        chat = [{"role": "user", "content": "Be brief.\n\nRead: AAABBB"}, *chat[2:]]
    for question in ("Why?", Turn("user", "Why?")):
        assert said(SCHEMA, tokens, Import("a"), Import("b"), question) == tokens.chat(chat)  # type: ignore[misc]
    # Where the schema ends with the user's message, text goes on with it.
    schema = Schema.from_text('<schema name="s"><user>Read: <module name="a">AAA</module></user></schema>')
    expected = tokens.chat([{"role": "user", "content": "Read: AAA\nWhy?"}])  # type: ignore[misc]
    assert said(schema, tokens, Import("a"), "Why?") == expected
    cached = lay_out(SchemaLayout(schema, tokens), schema.prompt(Import("a"), "Why?")).parts
    assert [part.name for part in cached.values()] == ["#1", "a"]


def test_messages_without_messages_in_the_schema() -> None:
    schema = Schema.from_text('<schema name="s">Text. <module name="a">AAA</module></schema>')
    assert said(schema, tokens_of("gemma"), Import("a"), Turn("user", "Why?")) == (
        "<bos>Text. AAA<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert said(schema, tokens_of("chatml"), Import("a"), "Why?") == "Text. AAAWhy?"
    # What marks the places of contents may stand in a question.
    text = "\ue0000\ue000 and \ue001"
    assert text in said(SCHEMA, tokens_of("chatml"), Turn("user", text))


REPEATS = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
MOVES = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
COUNTS = "{% for m in messages %}[{{ messages | length }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template", [None, "{{ messages[0].content }}", REPEATS, MOVES, "{{ raise_exception('no') }}", COUNTS]
)
def test_a_template_that_is_missing_or_cannot_be_cut_is_refused(template: str | None) -> None:
    tokens = Tokens(tokenize, chat=None if template is None else renderer(template))
    with pytest.raises(PMLError) as caught:
        said(SCHEMA, tokens, Turn("user", "a"), Turn("assistant", "b"))
    assert template == COUNTS or caught.value.line is not None


def test_a_scaffold_of_messages_holds_their_words() -> None:
    schema = Schema.from_text(
        '<schema name="s"><scaffold><system>Be brief.</system><user>Read: <module name="a">AAA</module></user></scaffold>'
        "</schema>"
    )
    tokens = tokens_of("chatml")
    [part] = SchemaLayout(schema, tokens).parts
    assert part.is_contiguous
    expected = tokens.chat([*messages("")[:1], {"role": "user", "content": "Read: AAA\nWhy?"}])  # type: ignore[misc]
    assert said(schema, tokens, Import("a"), "Why?") == expected


def test_a_real_tokenizer_reads_what_its_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(reference.__file__).with_name("weights"))
    layout = SchemaLayout(SCHEMA, Tokens.of(tokenizer))
    found = lay_out(layout, SCHEMA.prompt(Import("a"), Import("b"), "Why?"))
    written = tokenizer.apply_chat_template(
        messages("Read: AAABBB", {"role": "user", "content": "Why?"}), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(found.token_ids) == written
    assert found.token_ids.count(tokenizer.bos_token_id) == 1
    assert layout.tokens.filler_id == tokenizer.pad_token_id
