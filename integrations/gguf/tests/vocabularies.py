"""Vocabulary-only GGUF files, made from tokenizers, and llama.cpp's reading of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
from gguf import GGUFWriter, TokenType

from cacheblend_gguf.llama import quiet
from cacheblend_gguf.vocabulary import Vocabulary


@contextmanager
def vocabulary_of(path: Path) -> Iterator[Vocabulary]:
    """Yield the vocabulary of a GGUF file, which need not have anything else."""
    quiet()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    assert model, f"llama.cpp does not load {path}"
    try:
        yield Vocabulary(path, model)
    finally:
        llama_cpp.llama_model_free(model)


def write_vocabulary(path: Path, architecture: str, pre: str, made: dict[str, Any], **options: Any) -> Path:
    """Write the vocabulary of a byte-level tokenizer, given what its ``tokenizer.json`` holds, as llama.cpp's converter does."""
    words = {id: (word, TokenType.NORMAL) for word, id in made["model"]["vocab"].items()}
    for token in made["added_tokens"]:
        kind = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        words[token["id"]] = token["content"], kind
    every = [words.get(id, (f"[PAD{id}]", TokenType.UNUSED)) for id in range(max(words) + 1)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in made["model"]["merges"]]
    return write(path, architecture, "gpt2", every, pre=pre, merges=merges, **options)


def write(
    path: Path,
    architecture: str,
    model: str,
    words: list[tuple[str, TokenType]],
    *,
    pre: str = "",
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    template: str = "",
) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([kind for _, kind in words])
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
