"""Tokenizers of GGUF files: real vocabularies, and a small one that transformers reads too."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from gguf import TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from cacheblend_gguf import GGUFEngine
from cacheblend_gguf.llama import quiet
from cacheblend_gguf.tokenizer import LlamaTokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import MARK, lexer_of
from integrations.gguf.tests.kit import write_model

# Those that llama.cpp's source comes with, which `make install-gguf` puts there.
FOLDER = Path(os.environ.get("CACHEBLEND_VOCABULARIES", Path(sys.prefix) / "vocabularies"))
NAMES = (
    "aquila baichuan command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 gpt-neox llama-bpe llama-spm mpt phi-3 "
    "qwen2 qwen35 refact starcoder"
).split()
TEXTS = st.lists(
    st.sampled_from([*map(chr, range(33, 127)), " ", "\n", "\n\n", "\t", "  ", "    ", "'s", "'LL", "12345"])
    | st.characters(exclude_categories=("Cn", "Cs", "Co", "Cc")),
    max_size=24,
).map("".join)
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@contextmanager
def opened(path: Path) -> Iterator[LlamaTokenizer]:
    """Yield the tokenizer of a file that need not have anything else."""
    quiet()
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    yield LlamaTokenizer(path, model)
    llama_cpp.llama_model_free(model)


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} has no vocabularies")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_spelled_again_and_control_tokens_are_only_the_templates(name: str) -> None:
    with opened(FOLDER / f"ggml-vocab-{name}.gguf") as tokenizer:
        lexer = lexer_of(tokenizer)
        for id in sorted(lexer.controls):
            assert lexer.read(str(tokenizer.added_tokens_decoder[id]))[0] == [id]
        spellings = [str(tokenizer.added_tokens_decoder[id]) for id in sorted(lexer.controls)[:50]]

        @SETTINGS
        @given(TEXTS, st.sampled_from(spellings))
        def check(text: str, control: str) -> None:
            said = lexer.said(text + control)
            ids = lexer.read(said)[0]
            assert lexer.text(ids) == said.replace(MARK, "") == text + control
            assert lexer.controls.isdisjoint(ids)

        check()


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_a_small_one_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=letters, show_progress=False)
    backend.train([str(path) for path in Path(__file__).parents[3].glob("docs/*.md")], trainer)
    made: dict[str, Any] = json.loads(backend.to_str())["model"]
    words = [(word, TokenType.NORMAL) for word in sorted(made["vocab"], key=made["vocab"].__getitem__)]
    words += [
        ("<|im_start|>", TokenType.CONTROL),
        ("<|im_end|>", TokenType.CONTROL),
        ("<tool>", TokenType.USER_DEFINED),
    ]
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<tool>"])
    merges = [each if isinstance(each, str) else " ".join(each) for each in made["merges"]]
    path = write_model(tmp_path / "a.gguf", words, merges=merges, template=CHATML)
    with GGUFEngine.from_pretrained(path) as engine:
        tokenizer = engine.tokenizer

        @SETTINGS
        @given(st.lists(TEXTS | st.sampled_from(["<|im_start|>", "<tool>", "<|im_end|>"]), max_size=5).map("".join))
        def check(text: str) -> None:
            wanted = backend.encode(text).ids
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted
            for skips in (False, True):
                assert tokenizer.decode(wanted, skip_special_tokens=skips) == backend.decode(wanted, skips)

        check()
        said = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert said == "<|im_start|>user\nHi<|im_end|>\n"
        # A client of a server gets it as transformers has it: the same words are control tokens.
        tokenizer.save_pretrained(tmp_path / "saved")
        saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert saved.chat_template == CHATML
        assert lexer_of(saved).said("<|im_end|><tool>") == lexer_of(tokenizer).said("<|im_end|><tool>")
    assert tokenizer.decode([5])
    with pytest.raises(ConfigError, match="closed"):
        tokenizer("too late")
