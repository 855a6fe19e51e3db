"""Settings of an application of Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import load_yaml, read_yaml_text
from cacheblend_serve.settings import ServeConfig

__all__ = ["AppArgs", "AppSettings"]


@dataclass(frozen=True)
class AppSettings:
    """Settings as resolved where an application was built. Replicas have the same, whatever their own environment says."""

    engine: EngineConfig
    blend: BlendConfig
    serve: ServeConfig

    def check_replicas(self, most: int) -> None:
        """Raise `ConfigError` if that many replicas would not know of each other's documents."""
        if most > 1 and (self.engine.remote is None or self.engine.names is None):
            raise ConfigError(
                f"there may be {most} replicas, and each would know only the documents that it was given itself; set remote and "
                "names, the addresses of what they share (settings: {remote: redis://..., names: redis://...})"
            )


class AppArgs(BaseModel):
    """Arguments of `build_app`: those of ``serve run``, or ``args`` in a file for ``serve deploy``.

    Parameters
    ----------
    model : str
        A Hugging Face id, or a folder that all machines have.
    store : Path, optional
        A folder of this name on each machine, in which each replica there has one of its own. By default KV is kept in RAM alone.
    backend : str, optional
        What answers: "engine", or "vllm", the default where that is installed.
    arguments : tuple of str
        Further arguments of a server of vLLM, such as those after the ``--`` of ``cacheblend-rag serve``.
    config : Path, optional
        A file of settings (YAML), the engine's, of blending and the server's, read where the application is built.
    settings : dict
        Settings of the same kinds that stand over the file's.
    min_replicas, max_replicas : int
        How few and how many replicas; between them Ray Serve decides.
    target_ongoing_requests : float
        Requests of a replica at the same time that it aims at.
    num_cpus, num_gpus : float
        What a replica takes.
    fronts : int
        Processes that take requests and choose a replica for each.
    router : "nearest" or "balanced"
        Whether a request goes to the replica that holds most of what it names, or to one of two at random, as Ray Serve's own
        router has it.
    queue_bound : int
        By how many requests the queue of the replica that holds most may be longer than the shortest before load decides.
    stats_s : float
        How often replicas say what they hold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    store: Path | None = None
    backend: str | None = None
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    settings: dict[str, Any] = {}
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=4.0, gt=0)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    fronts: int = Field(default=1, ge=1)
    router: Literal["nearest", "balanced"] = "nearest"
    queue_bound: int = Field(default=4, ge=0)
    stats_s: float = Field(default=5.0, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> AppArgs:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is below min_replicas={self.min_replicas}; give as many or more"
            )
        return self

    def resolve(self) -> AppSettings:
        """Return what all settings come to here: the environment's, the file's over them, and over those what was given.

        Raises
        ------
        ConfigError
            If settings are wrong, or replicas would not know of each other's documents.
        """
        values: dict[str, Any] = {}
        if self.config is not None:
            read = load_yaml(read_yaml_text(self.config), str(self.config))
            if not isinstance(read, dict | None):
                raise ConfigError(f"settings file {self.config} must be a mapping of names to values")
            values = read or {}
        values = {**values, **self.settings}
        settings = AppSettings(
            EngineConfig.from_mapping(values), BlendConfig.from_mapping(values), ServeConfig.from_mapping(values)
        )
        settings.check_replicas(self.max_replicas)
        return settings
