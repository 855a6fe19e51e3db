"""Tokenizers of GGUF files, as they are read here and by llama.cpp: real vocabularies, and small ones in families' forms."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cacheblend_gguf.tokenizer import check_tokenizer, read_tokenizer
from cacheblend_gguf.vocabulary import Vocabulary
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.lexer import lexer_of
from integrations.gguf.tests.kit import gemma, smollm
from integrations.gguf.tests.vocabularies import vocabulary_of, write_vocabulary

# Those that llama.cpp's source comes with, which `make install-gguf` puts there.
FOLDER = Path(os.environ.get("CACHEBLEND_VOCABULARIES", Path(sys.prefix) / "vocabularies"))
# Old ones that say nothing of how words are split, or split them as no other does, and two of encoders.
REFUSED = {"aquila", "bert-bge", "deepseek-llm", "falcon", "gpt-neox", "mpt", "nomic-bert-moe"}
TAKEN = set(
    "baichuan command-r deepseek-coder gemma-4 gpt-2 llama-bpe llama-spm phi-3 qwen2 qwen35 refact starcoder".split()
)

ASCII = st.sampled_from([*map(chr, range(32, 127)), "\n", "\n\n", "\t", "  ", "    ", "'s", "'LL", "12345"])
ANY = st.characters(exclude_categories=("Cn", "Cs", "Co", "Cc"))


def equal(vocabulary: Vocabulary, tokenizer: Any, letters: st.SearchStrategy[str], count: int = 150) -> None:
    """Assert that random text is read alike, as text that goes on."""
    lexer = lexer_of(tokenizer)
    before = len(vocabulary.tokenize("\n")) if lexer.has_prefix else 0

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(letters, max_size=24).map("".join))
    def check(text: str) -> None:
        if lexer.said(text) == text and not text.startswith("\n"):
            wanted = vocabulary.tokenize("\n" + text if before else text)[before:]
            assert lexer.read(text)[0] == wanted

    check()


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} has no vocabularies")
@pytest.mark.parametrize("name", sorted(REFUSED | TAKEN))
def test_vocabularies_of_llama_cpp(name: str) -> None:
    with vocabulary_of(FOLDER / f"ggml-vocab-{name}.gguf") as vocabulary:
        if name in REFUSED:
            with pytest.raises(UnsupportedModelError, match=rf"ggml-vocab-{name}\.gguf.* in transformers"):
                check_tokenizer(vocabulary, read_tokenizer(vocabulary))
        else:
            tokenizer = read_tokenizer(vocabulary)
            check_tokenizer(vocabulary, tokenizer)
            assert len(tokenizer) <= len(vocabulary)
            equal(vocabulary, tokenizer, ASCII | ANY)


@pytest.mark.parametrize("model", [smollm, gemma])
def test_models(model: Any, tmp_path: Path) -> None:
    with vocabulary_of(model(tmp_path)) as vocabulary:
        tokenizer = read_tokenizer(vocabulary)
        check_tokenizer(vocabulary, tokenizer)
        equal(vocabulary, tokenizer, ASCII | ANY)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Of families: the name of how words are split, control tokens, other added tokens, and a template.
FORMS = {
    "qwen3": ("qwen2", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<think>", "</think>", "<tool_call>"], CHATML),
    "llama3": ("llama-bpe", ["<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"], [], ""),
    "deepseek-r1": (
        "deepseek-r1-qwen",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>"],
        ["<think>", "</think>"],
        "<｜User｜>{{ x }}",
    ),
    "deepseek-v3": ("deepseek-v3", ["<｜begin▁of▁sentence｜>", "<｜Assistant｜>"], [], ""),
    "gpt-oss": (
        "gpt-4o",
        ["<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"],
        [],
        "<|start|>user<|message|>",
    ),
    "mistral-nemo": ("tekken", ["<s>", "</s>", "[INST]", "[/INST]"], [], "[INST]{{ x }}[/INST]"),
    "smollm": ("smollm", ["<|im_start|>", "<|im_end|>"], [], CHATML),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Return a small byte-level tokenizer, trained on the project's own pages."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train([str(path) for path in Path(__file__).parents[3].glob("docs/*.md")], trainer)
    made: dict[str, Any] = json.loads(backend.to_str())
    return made


def with_added(trained: dict[str, Any], controls: list[str], others: list[str]) -> dict[str, Any]:
    count = len(trained["model"]["vocab"])
    tokens = [{"content": text, "special": text in controls} for text in (*controls, *others)]
    return {**trained, "added_tokens": [{"id": count + number, **token} for number, token in enumerate(tokens)]}


@pytest.fixture
def vocabulary(request: pytest.FixtureRequest, trained: dict[str, Any], tmp_path: Path) -> Iterator[Vocabulary]:
    pre, controls, others, template = request.param
    made = with_added(trained, controls, others)
    with vocabulary_of(write_vocabulary(tmp_path / "a.gguf", "llama", pre, made, template=template)) as vocabulary:
        yield vocabulary


@pytest.mark.parametrize("vocabulary", FORMS.values(), ids=FORMS, indirect=True)
def test_families(vocabulary: Vocabulary, request: pytest.FixtureRequest) -> None:
    _, controls, others, _ = FORMS[request.node.callspec.id]
    tokenizer = read_tokenizer(vocabulary)
    check_tokenizer(vocabulary, tokenizer)
    first = len(vocabulary) - len(controls) - len(others)
    lexer, added = lexer_of(tokenizer), [*controls, *others]
    assert lexer.read("".join(added))[0] == list(range(first, len(vocabulary)))
    # None of them is read where it was only said.
    said = lexer.read(lexer.said("a" + "b".join(controls)))[0]
    assert not set(said) & set(range(first, first + len(controls)))
    simplified = vocabulary.pre in ("gpt-4o", "tekken")
    equal(vocabulary, tokenizer, ASCII if simplified else ASCII | ANY)


@pytest.mark.parametrize("vocabulary", [("qwen2", ["<|im_start|>"], [], CHATML)], indirect=True)
def test_what_is_refused(vocabulary: Vocabulary, trained: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = read_tokenizer(vocabulary)
    longer = with_added(trained, ["<|im_start|>"], ["<one more>"])
    path = write_vocabulary(tmp_path / "b.gguf", "llama", "qwen2", longer)
    with vocabulary_of(path) as other:
        check_tokenizer(other, tokenizer)
        with pytest.raises(UnsupportedModelError, match="give this model's own"):
            check_tokenizer(vocabulary, read_tokenizer(other))
    shifted = with_added(trained, ["<|im_start|>"], [])
    shifted["added_tokens"].insert(0, {"id": shifted["added_tokens"][0]["id"], "content": "<|first|>", "special": True})
    shifted["added_tokens"][1]["id"] += 1
    with vocabulary_of(write_vocabulary(tmp_path / "c.gguf", "llama", "qwen2", shifted)) as other:
        with pytest.raises(UnsupportedModelError, match="first"):
            check_tokenizer(other, tokenizer)
    same = with_added(trained, ["<|im_start|>"], [])
    with vocabulary_of(write_vocabulary(tmp_path / "d.gguf", "llama", "gpt-2", same)) as other:
        with pytest.raises(UnsupportedModelError, match=r"is read differently"):
            check_tokenizer(vocabulary, read_tokenizer(other))


def test_a_word_that_looks_like_a_control_token(trained: dict[str, Any], tmp_path: Path) -> None:
    """It is one if the chat template writes it, and an ordinary word if not."""
    for template, is_control in ((CHATML, True), ("", False)):
        made = json.loads(json.dumps(trained))
        words = made["model"]["vocab"]
        words |= {"<|im_end|>": len(words), "</s>": len(words) + 1}
        made["added_tokens"] = []
        path = write_vocabulary(tmp_path / f"{is_control}.gguf", "llama", "qwen2", made, template=template)
        with vocabulary_of(path) as vocabulary:
            tokenizer = read_tokenizer(vocabulary)
            check_tokenizer(vocabulary, tokenizer)
            lexer = lexer_of(tokenizer)
            assert (lexer.read("<|im_end|>")[0] == [words["<|im_end|>"]]) == is_control
            assert lexer.read(lexer.said("x</s>"))[0] == vocabulary.tokenize("x</s>")
