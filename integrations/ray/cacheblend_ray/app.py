"""The application of Ray Serve: fronts that take requests, and replicas that answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra
from cacheblend_ray.settings import AppArgs

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["AppArgs", "build_app"]

# Of a front, which computes nothing.
_FRONT_REQUESTS = 1000


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
        If Ray is not installed, or settings are wrong or contradict each other.
    """
    with needs_extra("ray", "serving with many machines"):
        from ray import serve
        from ray.serve.config import AutoscalingConfig

        from cacheblend_ray.front import Front
        from cacheblend_ray.replica import Replica

    try:
        args = AppArgs.model_validate(args)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'args'}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{said}; valid arguments are {', '.join(AppArgs.model_fields)}") from error
    settings = args.resolve()
    config = settings.serve
    # A replica says how many it takes: what is beyond that waits in the front.
    drain_s = config.drain_s + 5
    nearest = {
        "request_router_class": "cacheblend_ray.router.NearestRouter",
        "request_router_kwargs": {"queue_bound": args.queue_bound},
        "request_routing_stats_period_s": args.stats_s,
    }
    replicas = serve.deployment(
        name="Replica",
        max_ongoing_requests=config.requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.target_ongoing_requests,
        ),
        request_router_config=nearest if args.router == "nearest" else {},
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
    return fronts.bind(replicas.bind(args, settings), config)
