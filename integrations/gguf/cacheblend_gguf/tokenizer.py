"""Tokenizer of a GGUF file, as transformers reads it, and as llama.cpp must agree with it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp
import transformers
from huggingface_hub.constants import HF_HOME
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from cacheblend_gguf.vocabulary import Vocabulary
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.lexer import Lexer, lexer_of

__all__ = ["check_tokenizer", "read_tokenizer"]

_KEPT = Path(HF_HOME) / "cacheblend-gguf"
# Changes when other things are made of the same file.
_MADE = 2

_NORMAL, _CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_NORMAL, llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_SPECIAL = _CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_ADDED = _SPECIAL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_LEFT, _RIGHT = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP, llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP

# How words are split before GPT-2's own expression does it, or in its place, by the file's name of it: those that transformers
# does not know, as llama.cpp has them.
_BEFORE_GPT2 = dict.fromkeys("starcoder refact command-r smollm codeshell exaone minerva-7b".split(), (r"\p{N}",))
_SPLITS = {
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
# Words of the vocabulary are taken whole in these, whatever their merges.
_WHOLE = frozenset("llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 tekken glm4".split())
# llama.cpp splits words of these by an expression that tells capitals in ASCII only; transformers has the model's own.
_SIMPLIFIED = frozenset("tekken gpt-4o llama4 kanana2 minimax-m2".split())

# What tokenizers differ in.
_PROBES = (
    "The ferry leaves  at 12:05.\n\n\tNo. 3",
    "I'm sure you'll say it's Anna's; THEY'RE not, he'd've",
    "1 12 123 1234 12345678 3.14159 1,000,000.00 0x1F 2nd v1.2.3 50% -7 +8 1e-9",
    "def f(x, *, y=None):\n    if x != y:\n        return {'a': [x, y]}\n\n\n\tpass  # done\r\n",
    '<a href="https://x.org/?q=a&b=%20">it</a>\n\n| a | b |\n|---|---|\n```json\n{"a": "\\n"}\n```\n',
    "a  b   c    d     e        f                z\t\tg\t\t\th \n \n\n i\n\n\n\nj \r\n\r\n k   ",
    "snake_case camelCase PascalCase UPPER kebab-case a.b.c::d->e && !x ?: ... --- === ~/`$PATH` #tag @me C++ €5 £3",
    "Ærø, žluťoučký kůň, naïve façade, Größe, İstanbul, Đà Nẵng, ŁÓDŹ",
    "Ελληνικά Русский язык українська עברית العربية فارسی հայերեն ქართული",
    "東京都に行く。中文分词，测试！한국어 띄어쓰기 ไทยไม่มีช่องว่าง हिन्दी में नमस्ते বাংলা தமிழ் አማርኛ",
    "\U0001f6a2 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1f0 \U0001f44d\U0001f3fd ☃",
    "→ ≤ ∑ ½ ² ① “so” ‘it’ – — … «x»",
)
_EVERY = 101
"""Of the vocabulary's own words, each so many-th is read as well."""


def read_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return the tokenizer of a GGUF file.

    Transformers takes seconds to read one of 262,000 tokens out of its file, so what comes of it is kept beside what was
    downloaded from the Hub.
    """
    path = vocabulary.path
    status = path.stat()
    made_of = f"{_MADE}|{path.resolve()}|{status.st_size}|{status.st_mtime_ns}|{transformers.__version__}"
    kept = _KEPT / hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()
    # Whatever is wrong with it, the file has it too.
    with suppress(Exception):
        return PreTrainedTokenizerFast.from_pretrained(str(kept), local_files_only=True)
    try:
        read = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers cannot read the tokenizer of {path.name} ({str(error).splitlines()[0]}); use the model's folder "
            "in transformers"
        ) from error
    if not isinstance(read.backend_tokenizer.model, BPE):
        raise UnsupportedModelError(
            f"the tokenizer of {path.name} has no merges; use the model's folder in transformers"
        )
    tokenizer = _completed(read, vocabulary)
    # A disk that is full or not to be written costs time only.
    with suppress(OSError):
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as making:
            tokenizer.save_pretrained(f"{making}/made")
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(f"{making}/made", kept)
    return tokenizer


def _completed(read: Any, vocabulary: Vocabulary) -> Any:
    """Return a tokenizer with the file's own list of added tokens, and its way to split words, where transformers has others."""
    made = json.loads(read.backend_tokenizer.to_str())
    words, merges = made["model"]["vocab"], made["model"]["merges"]
    known, merged = {id: word for word, id in words.items()}, {"".join(pair) for pair in merges}
    special = {str(token) for token in read.added_tokens_decoder.values() if token.special}
    template = str(read.chat_template or "")
    added = []
    for id, (text, attributes) in enumerate(vocabulary.words()):
        # llama.cpp has ordinary words that look like control tokens among those; here the template tells.
        if not attributes & _ADDED or (attributes & _NORMAL and text not in template):
            continue
        word = known.get(id, text)
        if word != text:
            # Transformers spells it in bytes, as it does ordinary words.
            if word in merged:
                continue
            del words[word]
        words[text] = id
        is_special = bool(attributes & _SPECIAL) or text in special
        strips = {"lstrip": bool(attributes & _LEFT), "rstrip": bool(attributes & _RIGHT)}
        added.append(
            {"id": id, "content": text, "special": is_special, "normalized": False, "single_word": False, **strips}
        )
    made["added_tokens"] = added
    made["model"]["ignore_merges"] = vocabulary.pre in _WHOLE
    backend = Tokenizer.from_str(json.dumps(made))
    before = _BEFORE_GPT2.get(vocabulary.pre, _SPLITS.get(vocabulary.pre))
    if before is not None:
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=vocabulary.pre in _BEFORE_GPT2)
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in before]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_words])
    named = {name: token for name, token in read.special_tokens_map.items() if token in words}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=read.chat_template, **named)


def check_tokenizer(vocabulary: Vocabulary, tokenizer: Any) -> None:
    """Raise `UnsupportedModelError` if a tokenizer makes other ids of control tokens, or of ordinary text, than llama.cpp."""
    name = vocabulary.path.name
    if len(tokenizer) > len(vocabulary):
        raise UnsupportedModelError(
            f"the tokenizer has {len(tokenizer)} tokens, and {name} only {len(vocabulary)}; give this model's own tokenizer"
        )
    lexer, plain = lexer_of(tokenizer), _Plain(vocabulary, tokenizer)
    theirs = Lexer(plain)
    ordinary = []
    for id, (text, attributes) in enumerate(vocabulary.words()):
        if attributes == _NORMAL:
            ordinary.append([id])
        elif attributes & _CONTROL and not attributes & _NORMAL and lexer.read(text)[0] != [id]:
            raise _differs(vocabulary, text, lexer.read(text)[0], [id])
    probes = [(text, begins) for begins in (False, True) for text in _PROBES]
    for text, begins in (*probes, *((text, False) for text in lexer.texts(ordinary[::_EVERY]))):
        # Half a character is no text, and control tokens that are typed are split on purpose.
        if "\ufffd" in text or lexer.said(text) != text or (vocabulary.pre in _SIMPLIFIED and not text.isascii()):
            continue
        ours, wanted = (each.read(text, begins=begins)[0] for each in (lexer, theirs))
        if ours != wanted:
            raise _differs(vocabulary, text, ours, wanted)


class _Plain:
    """Llama.cpp's way to read ordinary text, in the form of a tokenizer of transformers."""

    is_fast, chat_template = False, None

    def __init__(self, vocabulary: Vocabulary, tokenizer: Any) -> None:
        self._vocabulary, self.decode = vocabulary, tokenizer.decode
        self.added_tokens_decoder: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self._vocabulary.tokenize(text)}


def _differs(vocabulary: Vocabulary, text: str, ours: list[int], theirs: list[int]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the tokenizer of {vocabulary.path.name} ({vocabulary.pre or 'without a name'}) is read differently from llama.cpp: "
        f"{text[:60]!r} is {ours[:12]}, in llama.cpp {theirs[:12]}; use the model's folder in transformers"
    )
