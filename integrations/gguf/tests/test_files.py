"""The forms in which a GGUF model is named, and what is said of names that lead to none."""

from pathlib import Path
from shutil import copy

import pytest

from cacheblend_gguf.files import find_file, parts_of
from cacheblend_gguf.tokenizer import read_tokenizer
from cacheblend_rag.errors import ConfigError
from integrations.gguf.tests.kit import smollm

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
        ({}, "x.gguf", "there is no such GGUF file"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", r"a folder with 2 GGUF models; name one, .*a\.gguf for example"),
        ({"a.gguf": b"version https://git-lfs"}, "a.gguf", "begins with b'vers'; download it again"),
        ({"a.gguf": b""}, "a.gguf", "is not a GGUF file"),
        ({PARTS[0]: b"GGUF"}, "", f"{PARTS[1]} is not there; download it too"),
        ({}, "", "neither a GGUF file nor a folder with one"),
    ],
)
def test_names_of_nothing(tmp_path: Path, there: dict[str, bytes], named: str, said: str) -> None:
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        find_file(tmp_path / named)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, name: str) -> str:
        asked.append((repo, name))
        (tmp_path / name).write_bytes(b"GGUF")
        return str(tmp_path / name)

    # As the tests run: without a network.
    with pytest.raises(ConfigError, match="was not downloaded before, and the Hugging Face Hub cannot be reached"):
        find_file("somebody/model:m.gguf")
    with pytest.raises(ConfigError, match="cannot be loaded: Repo id"):
        find_file("some//body:m.gguf")
    monkeypatch.setattr("cacheblend_gguf.files.hf_hub_download", download)
    assert find_file(f"somebody/model:{PARTS[1]}") == tmp_path / PARTS[0]
    assert asked == [("somebody/model", part) for part in PARTS]


def test_what_is_kept_of_a_tokenizer(tmp_path: Path, kept_tokenizers: Path) -> None:
    path, before = Path(copy(smollm(tmp_path), tmp_path)), set(kept_tokenizers.glob("*"))
    text = "<|im_start|>user\nÆrø  at 12:05"
    wanted = [read_tokenizer(path)(text)["input_ids"] for _ in range(2)]
    [kept] = set(kept_tokenizers.iterdir()) - before
    for damage in ("{", '{"version": "1.0"}'):
        (kept / "tokenizer.json").write_text(damage)
        assert [read_tokenizer(path)(text)["input_ids"] for _ in range(2)] == wanted
