"""``cacheblend-rag serve`` and ``keys``: answers over HTTP, and who may ask for them."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import ModelOption
from cacheblend_rag.cli.output import show_table
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra

__all__ = ["keys_app", "serve"]

KeysArgument = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="The file of keys.")]


def serve(
    model: ModelOption = "reference",
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Where KV is kept; by default in RAM only.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; others than this machine need --keys.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The port; 0 is any that is free.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="The keys of those who may ask (keys add)."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="Settings, as YAML, of all kinds."),
    ] = None,
) -> None:
    """Answer over HTTP, as OpenAI's API does, with stored chunks and documents beside it.

    Settings that no option has come from --config, or from the environment (CACHEBLEND_SERVE_PER_MINUTE=60). On SIGTERM or
    Ctrl-C, answers that are being written are finished first.
    """
    with needs_extra("serve", "serving"):
        import uvicorn

        from cacheblend_rag.serve.app import make_app
        from cacheblend_rag.serve.settings import ServeConfig

    from cacheblend_rag.config import BlendConfig, EngineConfig

    given = {"host": host, "port": port, "keys": keys}
    changes = {name: value for name, value in given.items() if value is not None}
    config = _config(ServeConfig, settings, changes)
    engine_config = _config(EngineConfig, settings, {})
    with open_engine(model, store=store, config=engine_config, blend=_config(BlendConfig, settings, {})) as engine:
        app = make_app(engine, config)
        listener = _listen(config.host, config.port)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                timeout_graceful_shutdown=round(config.drain_s) + 1,
                server_header=False,
            )
        )
        typer.echo(f"{engine.model_name} answers at http://{config.host}:{listener.getsockname()[1]}/v1")
        sys.stdout.flush()
        # uvicorn passes on the signal that it was stopped by.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"nothing can listen at {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from error


def _config(kind: Any, settings: Path | None, changes: dict[str, Any]) -> Any:
    """Return settings from a file, where one is given, and from the environment, with those of the command line over them."""
    return kind(**changes) if settings is None else kind.from_yaml(settings, **changes)


keys_app = typer.Typer(help="Who may ask a server.", no_args_is_help=True, rich_markup_mode=None)


@keys_app.command("add")
def add_key(
    file: KeysArgument,
    name: Annotated[str, typer.Option(help="What you call the key.")],
    tenant: Annotated[str, typer.Option(help="The tenant whose chunks it sees.")],
    per_minute: Annotated[int | None, typer.Option(min=1, help="Most requests of a minute.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may see the figures of all tenants.")] = False,
) -> None:
    """Make a key and print it, once; the file holds its digest only."""
    from cacheblend_rag.serve.keys import KeyFile, Owner

    typer.echo(KeyFile(file).add(Owner(tenant, name, per_minute, admin)))


@keys_app.command("remove")
def remove_key(file: KeysArgument, name: Annotated[str, typer.Argument(help="What the key is called.")]) -> None:
    """Take a key back; servers notice with the next request."""
    from cacheblend_rag.serve.keys import KeyFile

    KeyFile(file).remove(name)


@keys_app.command("list")
def list_keys(file: KeysArgument) -> None:
    """Say which keys there are, and whom they speak for."""
    from cacheblend_rag.serve.keys import KeyFile

    rows = [(owner.name, owner.tenant, owner.per_minute, "yes" if owner.is_admin else "") for owner in KeyFile(file)]
    show_table(f"{len(rows)} keys", ("name", "tenant", "a minute", "all figures"), rows, text_columns=2)
