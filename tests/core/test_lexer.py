"""What a model reads is the text it was given, and control tokens are a template's alone, whatever the tokenizer."""

import string
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chat.render import render_chat
from cacheblend_rag.lexer import MARK, lexer_of
from cacheblend_rag.stops import Spelling
from tests.families import tiny_reader

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "ferry"]
CHARACTERS = [*string.ascii_letters, *"0123456789.,;:?!<>/|_[](){}'\"-\n"]
PIECES = [" ", "\n", ", ", "Mara", "lives in", "Oslo.", ">", "0", *SPECIAL, *ADDED[:2], "<|im_", "é", "日本"]

CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)


def wrapped(inner: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def sentence_pieces(prefix: str) -> PreTrainedTokenizerFast:
    """As of Llama and Mistral, where the blank comes from a normalizer or from a pre-tokenizer."""
    merged = ["▁M", "▁l", "ar", "\n\n", ",▁", ">▁"]
    words = [*SPECIAL, "▁", *CHARACTERS, *merged, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [(word[:1], word[1:]) for word in merged]
    vocabulary = {word: id for id, word in enumerate(dict.fromkeys(words))}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if prefix == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", prefix, split=prefix != "first")
    strip = [] if prefix == "never" else [decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return wrapped(inner)


def byte_level(prefix: bool) -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE({word: id for id, word in enumerate([*SPECIAL, *sorted(alphabet)])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), *strip])
    return wrapped(inner)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, by bytes, with a blank before each text."""

    def __init__(self) -> None:
        self._words = [*SPECIAL, *map(chr, range(256))]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self._words)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in f" {text}".encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._words.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(map(ord, "".join(tokens))).decode(errors="replace").removeprefix(" ")


KINDS: dict[str, Any] = {
    **{f"sentence pieces, {each}": partial(sentence_pieces, each) for each in ("prepend", "first", "always", "never")},
    "bytes": partial(byte_level, False),
    "bytes with a blank": partial(byte_level, True),
    "slow": Slow,
}


@cache
def engine_of(kind: str, template: str | None = CHATML) -> BlendEngine:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ADDED])
    tokenizer.chat_template = template
    return BlendEngine(tiny_reader(vocab_size=len(tokenizer)), tokenizer, **engine_settings(self_check=False))


texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
every_kind = pytest.mark.parametrize("kind", KINDS)
few = settings(max_examples=40, deadline=None)


@every_kind
@few
@given(before=texts, chunks=st.lists(texts, max_size=3), after=texts)
@example("Notes:\n", ["Mara lives in Oslo.", "Otto paints."], "\n\nWho paints?")
@example("Notes: ", [" Mara", "\n\nOtto</s>"], " </s>")
@example(">", ["=", ",,"], ";")
def test_what_the_model_reads_is_the_text(kind: str, before: str, chunks: list[str], after: str) -> None:
    engine = engine_of(kind)
    lexer = lexer_of(engine.tokenizer)
    chunks = [chunk for chunk in chunks if chunk.strip()]
    said = [lexer.said(f"Notes{before}"), *map(Chunk, chunks), "\n\n", lexer.said(after)]
    bos, *ids = engine.prompt_ids(BlendPrompt(segments=said))
    assert engine.tokenizer.decode(ids) == "".join([f"Notes{before}", *chunks, "\n\n", after])
    assert bos == engine.tokenizer.bos_token_id
    assert lexer.controls.isdisjoint(ids)


@every_kind
@pytest.mark.parametrize("template", [CHATML, LLAMA])
@few
@given(said=st.lists(texts, min_size=3, max_size=3), chunk=texts, name=texts)
def test_only_the_template_writes_control_tokens(
    kind: str, template: str, said: list[str], chunk: str, name: str
) -> None:
    engine = engine_of(kind, template)
    lexer, controls = lexer_of(engine.tokenizer), []
    for first, second, third, document in ((*said, chunk), ("a", "b", "c", "d")):
        function = {"name": name if first != "a" else "a", "arguments": {first: [second]}}
        calls = [{"type": "function", "function": function}]
        turns = [
            {"role": "user", "content": [f"a{first}z", Chunk(document)]},
            {"role": "assistant", "content": [f"a{second}z"], "tool_calls": calls if template == CHATML else []},
            {"role": "user", "content": [f"a{third}z"]},
        ]
        ids = engine.prompt_ids(BlendPrompt(segments=render_chat(engine.tokenizer, turns)))
        controls.append([each for each in ids if each in lexer.controls])
        # After a token that was added, some of these tokenizers put a blank of their own.
        read = "".join(engine.tokenizer.decode(ids).split())
        assert all("".join(each.split()) in read for each in (f"a{first}z", f"a{second}z", f"a{third}z", document))
        assert MARK not in read
    assert controls[0] == controls[1]


def test_a_prompt_by_hand_may_write_control_tokens_and_its_chunks_may_not() -> None:
    engine = engine_of("bytes", None)
    ids = engine.prompt_ids(BlendPrompt("<|im_start|>A ferry: ", [Chunk("a ferry</s>b")], "<|im_end|>"))
    controls = [engine.tokenizer.decode([each]) for each in ids if each in lexer_of(engine.tokenizer).controls]
    assert controls == ["<s>", "<|im_start|>", "<|im_end|>"]
    # A word that was added and controls nothing is one token everywhere.
    assert ids.count(engine.tokenizer.convert_tokens_to_ids("ferry")) == 2


@every_kind
@given(answer=texts)
@few
def test_an_answer_keeps_the_blank_that_it_begins_with(kind: str, answer: str) -> None:
    lexer = lexer_of(engine_of(kind).tokenizer)
    for text in (answer, f" {answer}"):
        ids = lexer.read(lexer.said(text))[0]
        spelling = Spelling(lexer.text)
        assert lexer.text(ids) == "".join(map(spelling.add, ids)) + spelling.rest() == text
