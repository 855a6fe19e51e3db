"""Settings from arguments, the environment and YAML."""

import pickle
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import make_selector
from cacheblend_rag.selection.hkvd import HKVDSelector


def test_the_environment_fills_in_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "0.3")
    monkeypatch.setenv("CACHEBLEND_PREAMBLE", "[1, 3]")
    config = BlendConfig(selector="none")
    assert (config.recompute_ratio, EngineConfig().preamble, config.selector) == (0.3, (1, 3), "none")
    assert BlendConfig(recompute_ratio=0.2).recompute_ratio == 0.2


def test_a_bad_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "much")
    with pytest.raises(ConfigError, match="recompute_ratio='much'"):
        BlendConfig()


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text("recompute_ratio: 0.25\nselector: hkvd(check_layers=[1, 2])\ndtype: bfloat16\n")
    config = BlendConfig.from_yaml(path)
    assert (config.recompute_ratio, make_selector(config.selector)) == (0.25, HKVDSelector(check_layers=(1, 2)))
    assert EngineConfig.from_yaml(path).torch_dtype() == torch.bfloat16
    path.write_text("")
    assert BlendConfig.from_yaml(path) == BlendConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratio: 0.2", "unknown setting ratio"),
        ("- 1", "holds a list"),
        ("a: [", "cannot be read"),
        ("recompute_ratio: x", "recompute_ratio='x'"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        BlendConfig.from_yaml(path)


@settings(max_examples=150)
@given(st.binary(max_size=80) | st.text("ab:-[]{}&*!?|>'\"%@, \n#<1.0x_~", max_size=60).map(str.encode))
def test_whatever_a_file_holds_no_other_error_is_raised(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("settings") / "blend.yaml"
    path.write_bytes(data)
    for kind in (EngineConfig, BlendConfig):
        with suppress(ConfigError):
            kind.from_yaml(path)


def test_a_missing_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        BlendConfig.from_yaml(tmp_path / "none.yaml")


def test_replacing_checks_again_and_settings_are_frozen() -> None:
    config = BlendConfig(selector="none")
    assert config.replace(recompute_ratio=0.5).selector == "none"
    with pytest.raises(ConfigError, match="less than or equal to 1"):
        config.replace(recompute_ratio=2)
    with pytest.raises(ValueError, match="frozen"):
        config.enabled = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "values", [{"remote": ["redis://user:hunter2@host"]}, {"remote": "redis://user:hunter2@host", "ram_bytes": -1}]
)
def test_no_message_shows_the_password_of_a_remote_tier(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**values)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@given(st.text(st.characters(categories=["L", "N"]), min_size=8))
def test_no_dump_of_the_settings_shows_the_password_of_a_remote_tier(password: str) -> None:
    url = f"redis://user:{password}@host/0"
    config = EngineConfig(remote=url).replace(ram_bytes=0)
    dumps = [config, config.model_dump(), config.model_dump(mode="json"), config.model_dump_json(), dict(config)]
    for dump in dumps:
        assert password not in str(dump) + repr(dump)
    assert config.remote is not None and config.remote.get_secret_value() == url
    assert EngineConfig(**config.model_dump()) == config == pickle.loads(pickle.dumps(config))


def test_a_selector_in_the_environment_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "hkvd(1,2)")
    with pytest.raises(ConfigError, match=r"selector='hkvd\(1,2\)' cannot be read; write a name, or options after it"):
        make_selector(BlendConfig().selector)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device='gpu': unknown device; give cpu, cuda or cuda:N"),
        ({"selector": "random", "seed": 2**70}, "seed=1180591620717411303424 must be"),
        ({"selector": "hkvd", "gradual_start": float("inf")}, "gradual_start=inf must be"),
        ({"selector": "query", "look_layers": (3, 2)}, "look_layers=.*ascending"),
        ({"selector": "query", "look_layers": ()}, "look_layers=.*at least one"),
        ({"companions": "all"}, "companions='all'"),
    ],
)
def test_values_without_a_meaning_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_settings(**settings)


def test_a_servers_settings_are_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from cacheblend_serve.settings import ServeConfig

    monkeypatch.setenv("CACHEBLEND_SERVE_PER_MINUTE", "60")
    monkeypatch.setenv("CACHEBLEND_PER_MINUTE", "61")
    EngineConfig()
    assert ServeConfig().per_minute == 60
    # One prefix is not another's.
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["CACHEBLEND_PER_MINUTE"]
