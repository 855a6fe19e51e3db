"""The application of Ray Serve: fronts that take requests, and replicas that answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError, needs_extra
from cacheblend_serve.settings import ServeConfig

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["AppArgs", "build_app"]

# Of a front, which computes nothing.
_FRONT_REQUESTS = 1000


class AppArgs(BaseModel):
    """Arguments of `build_app`: those of ``serve run``, or ``args`` in a file for ``serve deploy``.

    Parameters
    ----------
    model : str
        A Hugging Face id, or a folder that all machines have.
    store : Path, optional
        A folder of this name on each machine, in which each replica has one of its own. By default KV is kept in RAM alone.
    backend : str, optional
        What answers: "engine", or "vllm", the default where that is installed.
    arguments : tuple of str
        Further arguments of vLLM, such as those after the ``--`` of ``cacheblend-rag serve``.
    settings : dict
        Settings of the engine, of blending and of the server, over those of the environment in which the application is built.
        `remote` and `names` must be among them.
    min_replicas, max_replicas : int
        How few and how many replicas; between them Ray Serve decides.
    target_ongoing_requests : float
        Requests of a replica at the same time that it aims at.
    num_cpus, num_gpus : float
        What a replica takes.
    fronts : int
        Processes that take requests and choose a replica for each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    store: Path | None = None
    backend: str | None = None
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=4.0, gt=0)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    fronts: int = Field(default=1, ge=1)


def build_app(args: AppArgs | Mapping[str, Any]) -> Application:
    """Return an application that answers as ``cacheblend-rag serve`` does, with as many replicas as are needed.

    ``serve run cacheblend_ray:build_app model=Qwen/Qwen2.5-0.5B-Instruct`` and ``serve deploy`` with a file call it.

    Parameters
    ----------
    args : AppArgs or mapping
        Model, settings and scaling; Ray gives them as a mapping.

    Raises
    ------
    ConfigError
        If Ray is not installed, settings are wrong, or replicas would not know of each other's documents.
    """
    with needs_extra("ray", "serving with many machines"):
        from ray import serve
        from ray.serve.config import AutoscalingConfig

        from cacheblend_ray.front import Front
        from cacheblend_ray.replica import Replica
        from cacheblend_serve.backend import Wanted

    try:
        args = AppArgs.model_validate(args)
        scaling = AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.target_ongoing_requests,
        )
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'args'}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{said}; valid arguments are {', '.join(AppArgs.model_fields)}") from error
    engine, config = EngineConfig.from_mapping(args.settings), ServeConfig.from_mapping(args.settings)
    blend = BlendConfig.from_mapping(args.settings)
    if engine.remote is None or engine.names is None:
        raise ConfigError(
            "each replica would know only the documents that it was given itself; set remote and names, the addresses of what "
            "all share (settings: {remote: redis://..., names: postgresql+psycopg://...})"
        )
    # Read here, so that replicas have the same, whatever their own environment says.
    wanted = Wanted(args.model, args.store, engine, blend, arguments=args.arguments)
    # A replica says how many requests it takes: what is beyond that waits in the front.
    drain_s = config.drain_s + 5
    router = {
        "request_router_class": "cacheblend_ray.router.NearestRouter",
        "request_router_kwargs": {"queue_bound": max(4.0, args.target_ongoing_requests / 4)},
    }
    replicas = serve.deployment(
        name="Replica",
        max_ongoing_requests=config.requests,
        autoscaling_config=scaling,
        request_router_config=router,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
        graceful_shutdown_timeout_s=drain_s,
    )(Replica)
    fronts = serve.deployment(
        name="Front",
        num_replicas=args.fronts,
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=drain_s,
    )(Front)
    return fronts.bind(replicas.bind(args.backend, wanted, config), config)
