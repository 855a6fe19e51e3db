"""What the benches share: settings, words, rounds, and what is told of many times."""

import random
from pathlib import Path

import pytest

from cacheblend_lab.bench.runner import in_rounds, median_ratio, percentiles
from cacheblend_lab.bench.settings import (
    AutoSetting,
    EncodeSetting,
    ModelSetting,
    PMLSetting,
    PrefetchSetting,
    TPOTSetting,
)
from cacheblend_lab.bench.shapes import RandomWords, made_up_word, text_of, word_tokenizer
from cacheblend_lab.bench.tiers import ColdFolder
from cacheblend_rag.errors import ConfigError


def test_each_round_begins_with_another_method() -> None:
    order: list[str] = []
    calls: list[str] = []

    def run(method: str) -> int:
        order.append(method)
        return len(order)

    results = in_rounds("abc", run, 2, unmeasured=1, say=calls.append)
    assert "".join(order) == "abcbcacab"
    # The first round is not among them; the others are in the order in which they were run.
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert calls == [f"measuring, {done} of 9" for done in range(1, 10)]


def test_ratios_are_taken_round_by_round() -> None:
    # The medians are 2 and 3.
    assert median_ratio([1, 9, 2], [1, 3, 4]) == 1
    with pytest.raises(ValueError, match="longer"):
        median_ratio([1], [1, 2])


def test_percentiles() -> None:
    assert percentiles([float(number) for number in range(200, 0, -1)]) == (101, 199, 200)
    assert percentiles([3.0]) == (3, 3, 3)


def test_words_are_read_as_the_tokens_that_were_drawn() -> None:
    tokenizer = word_tokenizer(50)
    ids = RandomWords(tokenizer, 3).token_ids(500)
    assert set(ids) == set(range(1, 50))
    assert tokenizer(text_of(ids), add_special_tokens=False)["input_ids"] == ids
    assert RandomWords(tokenizer, 3).text(500) == text_of(ids) != RandomWords(tokenizer, 4).text(500)
    chunks = RandomWords(tokenizer, 3).chunks(4, 125)
    assert " ".join(chunk.text for chunk in chunks) == text_of(ids)
    assert len({chunk.id for chunk in chunks}) == 4
    assert sorted(RandomWords(tokenizer, 0).choice(6, 6)) == list(range(6))
    assert made_up_word(random.Random(1)) == made_up_word(random.Random(1)).lower() != ""


@pytest.mark.parametrize("kind", [TPOTSetting, PMLSetting, PrefetchSetting, EncodeSetting, AutoSetting])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
        ({"device": "meta"}, "device 'meta' is not measured; choose cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; choose one of float32, float16, bfloat16"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
    ],
)
def test_what_no_model_can_be_measured_with_is_refused(
    kind: type[ModelSetting], changes: dict[str, str | int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind("tiny", **changes)  # type: ignore[arg-type]


def test_the_environment_does_not_change_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENABLED": "false", "ENCODE_ON": "second_use", "DTYPE": "float16"}.items():
        monkeypatch.setenv(f"CACHEBLEND_{name}", value)
    settings = ModelSetting("tiny").engine_settings(selector="random")
    config, blend = settings["config"], settings["blend"]
    assert (blend.enabled, config.encode_on, config.dtype) == (True, "add", "float32")
    assert blend.selector == "random"


def test_a_folder_for_a_measurement_is_removed(tmp_path: Path) -> None:
    folder = ColdFolder(tmp_path)
    assert folder.path.parent.parent == tmp_path
    folder.path.mkdir()
    for name in ("b", "a"):
        (folder.path / f"{name}.safetensors").write_bytes(bytes(5000))
    assert [file.stem for file in folder.files] == ["a", "b"]
    assert folder.file_bytes == 10_000
    # On a file system that lives in memory nothing can be dropped.
    assert folder.cached_share_after_drop() in (0.0, 1.0, None)
    folder.remove()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="missing"):
        ColdFolder(tmp_path / "missing")
