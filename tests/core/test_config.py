"""Settings from arguments, the environment and YAML."""

import pickle
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import make_selector
from cacheblend_rag.selection.ours import HKVDSelector


def test_the_environment_fills_in_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "0.3")
    monkeypatch.setenv("CACHEBLEND_PREAMBLE", "[1, 3]")
    config = BlendConfig(selector="random")
    assert (config.recompute_ratio, EngineConfig().preamble, config.selector) == (0.3, (1, 3), "random")
    assert BlendConfig(recompute_ratio=0.2).recompute_ratio == 0.2
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "much")
    with pytest.raises(ConfigError, match="recompute_ratio"):
        BlendConfig()


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text("recompute_ratio: 0.25\nselector: hkvd(check_layers=[1, 2])\ndtype: bfloat16\n")
    config = BlendConfig.from_yaml(path)
    assert (config.recompute_ratio, make_selector(config.selector)) == (0.25, HKVDSelector(check_layers=(1, 2)))
    assert EngineConfig.from_yaml(path).torch_dtype() == torch.bfloat16
    path.write_text("")
    assert BlendConfig.from_yaml(path) == BlendConfig()
    for text in ("ratio: 0.2", "- 1", "a: [", "recompute_ratio: x"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            BlendConfig.from_yaml(path)
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        BlendConfig.from_yaml(tmp_path / "none.yaml")


@settings(max_examples=150)
@given(st.binary(max_size=80) | st.text("ab:-[]{}&*!?|>'\"%@, \n#<1.0x_~", max_size=60).map(str.encode))
def test_whatever_a_file_holds_no_other_error_is_raised(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("settings") / "blend.yaml"
    path.write_bytes(data)
    for kind in (EngineConfig, BlendConfig):
        with suppress(ConfigError):
            kind.from_yaml(path)


def test_replacing_checks_again_and_settings_are_frozen() -> None:
    config = BlendConfig(selector="random")
    assert config.replace(recompute_ratio=0.5).selector == "random"
    with pytest.raises(ConfigError):
        config.replace(recompute_ratio=2)
    with pytest.raises(ValueError, match="frozen"):
        config.enabled = False  # type: ignore[misc]


@given(st.text(st.characters(categories=["L", "N"]), min_size=8))
def test_no_error_and_no_dump_of_the_settings_shows_the_password_of_a_remote_tier(password: str) -> None:
    # What a traceback has anyhow, the word ConfigError for one, may be drawn too.
    password += "9f3b7"
    url = f"redis://user:{password}@host/0"
    for values in ({"remote": [url]}, {"remote": url, "ram_bytes": -1}):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**values)
        assert password not in "".join(traceback.format_exception(caught.value))
    config = EngineConfig(remote=url).replace(ram_bytes=0)
    dumps = [config, config.model_dump(), config.model_dump(mode="json"), config.model_dump_json(), dict(config)]
    for dump in dumps:
        assert password not in str(dump) + repr(dump)
    assert config.remote is not None and config.remote.get_secret_value() == url
    assert EngineConfig(**config.model_dump()) == config == pickle.loads(pickle.dumps(config))
