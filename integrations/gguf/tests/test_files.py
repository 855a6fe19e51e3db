"""The forms in which a GGUF model is named, and what is said of names that lead to none."""

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tokenizers import pre_tokenizers

from cacheblend_gguf import GGUFEngine
from cacheblend_gguf.files import find_file, parts_of
from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptTooLongError
from integrations.gguf.tests.kit import write_model

PARTS = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]


@pytest.mark.parametrize(
    ("there", "named", "found"),
    [
        (["a.gguf"], "a.gguf", "a.gguf"),
        (["A.GGUF"], "A.GGUF", "A.GGUF"),
        (["sha256-0a"], "sha256-0a", "sha256-0a"),
        (["A.GGUF"], ".", "A.GGUF"),
        (["a.gguf", "mmproj-a.gguf"], ".", "a.gguf"),
        (PARTS, ".", PARTS[0]),
        (PARTS, PARTS[1], PARTS[0]),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_names(tmp_path: Path, kind: type, there: list[str], named: str, found: str) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"GGUF and more")
    assert find_file(kind(tmp_path / named)) == tmp_path / found
    assert [each.name for each in parts_of(tmp_path / found)] == (PARTS if there is PARTS else [found])


@pytest.mark.parametrize(
    ("there", "named", "said"),
    [
        ({}, "x.gguf", "no such GGUF file"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", "2 GGUF models"),
        ({"a.gguf": b"version https://git-lfs"}, "a.gguf", "llama.cpp"),
        ({"a.gguf": b""}, "a.gguf", "llama.cpp"),
        ({PARTS[0]: b"GGUF"}, "", "llama.cpp"),
        ({}, "", "no such GGUF file"),
    ],
)
def test_names_of_nothing(tmp_path: Path, there: dict[str, bytes], named: str, said: str) -> None:
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        GGUFEngine.from_pretrained(tmp_path / named)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, name: str) -> str:
        asked.append((repo, name))
        (tmp_path / name).write_bytes(b"GGUF")
        return str(tmp_path / name)

    # As the tests run: without a network.
    with pytest.raises(ConfigError, match="somebody/model"):
        find_file("somebody/model:m.gguf")
    with pytest.raises(ConfigError, match="Repo id"):
        find_file("some//body:m.gguf")
    monkeypatch.setattr("cacheblend_gguf.files.hf_hub_download", download)
    assert find_file(f"somebody/model:{PARTS[1]}") == tmp_path / PARTS[0]
    assert asked == [("somebody/model", part) for part in PARTS]


WORDS = [(word, TokenType.NORMAL) for word in (*pre_tokenizers.ByteLevel.alphabet(), "ab")]


@pytest.mark.parametrize(
    ("tokenizer", "words", "rows", "said"),
    [
        ("none", WORDS, None, "has no tokenizer"),
        ("gpt2", [*WORDS, ("cc", TokenType.NORMAL)], len(WORDS), "token_embd"),
    ],
)
def test_models_without_a_tokenizer_or_with_another(
    tmp_path: Path, tokenizer: str, words: Any, rows: int | None, said: str
) -> None:
    path = write_model(tmp_path / "bad.gguf", words, merges=["a b"], tokenizer=tokenizer, rows=rows)
    with pytest.raises(CacheBlendError, match=rf"bad\.gguf.*{said}"):
        GGUFEngine.from_pretrained(path, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_files_that_are_cut_and_prompts_that_are_too_long(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", WORDS, merges=["a b"])
    with GGUFEngine.from_pretrained(path) as engine:
        with pytest.raises(PromptTooLongError, match=r"window is 256.*shorten the text$"):
            engine.generate(BlendPrompt("ab " * 300), 3)
        with pytest.raises(PromptTooLongError, match="window of 256"):
            engine.add([Chunk("cd " * 200, "long")])
        assert engine.records(["long"]) == [None]
    with (
        GGUFEngine.from_pretrained(path, n_ctx=128) as engine,
        pytest.raises(PromptTooLongError, match=r"window is 128.*or open the file with a larger n_ctx, up to 256$"),
    ):
        engine.generate(BlendPrompt("ab " * 200), 3)
    content = path.read_bytes()
    for length in (4, 20, 24, 100, 1000, len(content) // 2, len(content) - 1000):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"cannot load .*a\.gguf"):
            GGUFEngine.from_pretrained(path)
