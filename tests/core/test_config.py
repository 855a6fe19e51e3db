"""Settings from arguments, the environment and YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError


def test_the_environment_fills_in_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "0.3")
    monkeypatch.setenv("CACHEBLEND_CHECK_LAYERS", "[1, 3]")
    config = BlendConfig(selector="none")
    assert (config.recompute_ratio, config.check_layers, config.selector) == (0.3, (1, 3), "none")
    assert BlendConfig(recompute_ratio=0.2).recompute_ratio == 0.2


def test_a_bad_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "much")
    with pytest.raises(ConfigError, match="recompute_ratio='much'"):
        BlendConfig()


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text("recompute_ratio: 0.25\ncheck_layers: [1, 2]\ndtype: bfloat16\n")
    config = BlendConfig.from_yaml(path)
    assert (config.recompute_ratio, config.check_layers, config.torch_dtype()) == (0.25, (1, 2), torch.bfloat16)
    path.write_text("")
    assert BlendConfig.from_yaml(path) == BlendConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratio: 0.2", "ratio is no setting"),
        ("- 1", "holds a list"),
        ("a: [", "cannot be read"),
        ("seed: x", "seed='x'"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        BlendConfig.from_yaml(path)


def test_a_missing_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        BlendConfig.from_yaml(tmp_path / "none.yaml")


def test_replacing_checks_again_and_settings_are_frozen() -> None:
    config = BlendConfig(selector="none")
    assert config.replace(recompute_ratio=0.5).selector == "none"
    with pytest.raises(ConfigError, match="finite"):
        config.replace(recompute_ratio=2)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "values",
    [
        {"remote": ["redis://user:hunter2@host"]},
        {"remote": "redis://user:hunter2@host", "check_layers": (1, 2), "ratio_schedule": (1.0,)},
    ],
)
def test_no_message_shows_the_password_of_a_remote_tier(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        BlendConfig(**values)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(BlendConfig(remote="redis://user:hunter2@host"))


def test_an_unknown_codec_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="disk_codec='int3'"):
        BlendConfig(disk_codec="int3")


def test_a_list_in_the_environment_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_CHECK_LAYERS", "1,2")
    with pytest.raises(ConfigError, match=r"check_layers.*lists are written as JSON, as in \[1,2\]"):
        BlendConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device='gpu': is no device; give cpu, cuda or cuda:N"),
        ({"seed": 2**70}, "seed=1180591620717411303424: "),
        ({"gradual_start": float("inf")}, "gradual_start=inf: "),
        ({"repair_ratio": -1}, "from 0 .repairs nothing. to 1"),
        ({"repair_ratio": 0.1, "kv_capacity": 0.5}, "what was evicted cannot be repaired"),
        ({"look_layers": (3, 2)}, "look_layers=.*ascending"),
        ({"look_layers": ()}, "look_layers=.*at least one"),
    ],
)
def test_values_without_a_meaning_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendConfig(**settings)
