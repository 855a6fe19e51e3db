"""What every bench of a model of random weights has to be told, and the checks that the benches' settings share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.settings import EngineSettings, engine_settings

__all__ = ["NO_LIMIT", "ModelSetting", "check_least", "dtype_named"]

NO_LIMIT = 2**63 - 1
"""Bytes that no measurement needs, for a RAM tier that keeps everything."""

_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelSetting:
    """A model of random weights, and how often what runs on it is measured.

    Attributes
    ----------
    shape : str
        The model's shape (`cacheblend_rag.lab.bench.SHAPES`).
    repeats : int
        Measured rounds; each runs every method once.
    device : str
        Where the model runs: "cpu", "cuda" or "cuda:N".
    dtype : {"float32", "float16", "bfloat16"}
        The dtype of its weights.
    seed : int
        Seed of weights and tokens.

    Raises
    ------
    ConfigError
        If one of them has no meaning, or this machine has no such device.
    """

    shape: str
    repeats: int = field(default=5, kw_only=True)
    device: str = field(default="cpu", kw_only=True)
    dtype: str = field(default="float32", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_least(self, 1, "repeats")
        dtype_named(self.dtype)
        try:
            known = torch.empty(0, device=self.device).device.type in ("cpu", "cuda")
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"device {self.device!r} cannot be used: {reason}") from error
        if not known:
            raise ConfigError(f"device {self.device!r} is not measured; choose cpu, cuda or cuda:N")

    def engine_settings(self, **settings: Any) -> EngineSettings:
        """Return an engine's settings under which every prompt is blended or refused, also where the environment says otherwise.

        Parameters
        ----------
        **settings : Any
            What the bench sets besides, or otherwise.

        Returns
        -------
        EngineSettings
            Without a limit of the RAM tier, and with no check of the model by itself.

        Raises
        ------
        ConfigError
            If a setting has no meaning.
        """
        named: dict[str, Any] = {
            "enabled": True,
            "encode_on": "add",
            "dtype": self.dtype,
            "device": self.device,
            "ram_bytes": NO_LIMIT,
            "self_check": False,
            "strict": True,
        }
        return engine_settings(**(named | settings))


def check_least(setting: object, least: int, *names: str) -> None:
    """Raise ConfigError if one of these counts of a setting is below the least that can be measured."""
    for name in names:
        count = getattr(setting, name)
        if count < least:
            raise ConfigError(f"{name}={count} must be at least {least}")


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype by its name.

    Raises
    ------
    ConfigError
        If no model and no KV is measured in it.
    """
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
