"""The forms in which a GGUF model is named, and what is said of names that lead to none."""

from pathlib import Path
from shutil import copy

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from cacheblend_gguf import GGUFEngine
from cacheblend_gguf.files import find_file, parts_of
from cacheblend_gguf.tokenizer import read_tokenizer
from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptTooLongError
from integrations.gguf.tests.kit import smollm
from integrations.gguf.tests.vocabularies import vocabulary_of

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
    with vocabulary_of(path) as vocabulary:
        wanted = [read_tokenizer(vocabulary)(text)["input_ids"] for _ in range(2)]
        [kept] = set(kept_tokenizers.iterdir()) - before
        for damage in ("{", '{"version": "1.0"}'):
            (kept / "tokenizer.json").write_text(damage)
            assert [read_tokenizer(vocabulary)(text)["input_ids"] for _ in range(2)] == wanted


WORDS = [*pre_tokenizers.ByteLevel.alphabet(), "ab"]


def write_model(path: Path, model: str | None, words: list[str], rows: int = len(WORDS)) -> Path:
    """Write a random Llama of one layer with that many rows of embeddings."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    if model is not None:
        writer.add_tokenizer_model(model)
    if model == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(words)
        writer.add_token_types([TokenType.NORMAL] * len(words))
        writer.add_token_merges(["a b"])
    else:
        writer.add_vocab_size(rows)
    drawn = np.random.default_rng(0)
    square = ("attn_q", "attn_k", "attn_v", "attn_output")
    shapes = {f"blk.0.{name}": (32, 32) for name in square} | {"token_embd": (rows, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {f"blk.0.{name}": (64, 32) for name in ("ffn_gate", "ffn_up")}
    shapes |= {name: (32,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", drawn.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("model", "words", "rows", "said"),
    [
        (None, WORDS, len(WORDS), "tokenizer"),
        ("none", WORDS, len(WORDS), "has no tokenizer"),
        ("gpt2", [*WORDS, "cc", "dd"], len(WORDS), "token_embd"),
        ("gpt2", WORDS, len(WORDS) + 7, "token_embd"),
    ],
    ids=["no tokenizer", "none", "longer than the embedding", "shorter"],
)
def test_models_without_a_tokenizer_or_with_another(
    tmp_path: Path, model: str | None, words: list[str], rows: int, said: str
) -> None:
    path = write_model(tmp_path / "bad.gguf", model, words, rows)
    with pytest.raises(CacheBlendError, match=rf"bad\.gguf.*{said}"):
        GGUFEngine.from_pretrained(path, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_files_that_are_cut_and_prompts_that_are_too_long(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", "gpt2", WORDS)
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
