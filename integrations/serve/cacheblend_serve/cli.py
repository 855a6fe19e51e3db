"""``cacheblend-rag serve`` and ``keys``: answers over HTTP, and who may ask for them."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from cacheblend_rag.cli.options import ModelOption
from cacheblend_rag.cli.output import make_quiet, show_table
from cacheblend_rag.errors import ConfigError

__all__ = ["keys_app", "serve"]

KeysArgument = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="The file of keys.")]


def serve(
    model: ModelOption,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Where KV is kept; by default in RAM only.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen; beyond this machine needs --keys.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="The port; 0 picks a free one.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="The file of keys for clients (keys add)."),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="Server and engine settings, YAML."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The backend: engine, or vllm (the default if installed)."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Further arguments for vLLM.")
    ] = None,
) -> None:
    """Serve OpenAI's API over HTTP, and chunks and documents with it.

    Other settings come from --config, or from the environment (CACHEBLEND_SERVE_PER_MINUTE=60). On SIGTERM or
    Ctrl-C, running answers are finished first; a second one stops them.
    """
    import uvicorn

    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_serve.app import make_app
    from cacheblend_serve.backend import Wanted, backend_module
    from cacheblend_serve.settings import ServeConfig

    given = {"host": host, "port": port, "keys": keys}
    changes = {name: value for name, value in given.items() if value is not None}
    config = _config(ServeConfig, settings, changes)
    engine_config, blend = _config(EngineConfig, settings, {}), _config(BlendConfig, settings, {})
    wanted = Wanted(model, store, engine_config, blend, tuple(arguments or ()))
    make_quiet()
    with _ended_by_sigterm(), backend_module(backend).open_backend(wanted) as answering:
        app = make_app(answering, config)
        listener = _listen(config.host, config.port)
        patience_s = round(config.drain_s) + 1
        server = _server(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=patience_s, server_header=False),
            app.state.server.gate,
        )
        typer.echo(f"{answering.model_name} answers at http://{config.host}:{listener.getsockname()[1]}/v1")
        sys.stdout.flush()
        # uvicorn passes on the signal that it was stopped by.
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
        if server.force_exit:
            raise _Terminated


def _server(config: Any, gate: Any) -> Any:
    """Return uvicorn's server, which closes the gate as soon as it is told to stop, and stops at once when told so again."""
    import uvicorn

    class Stopping(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            gate.close()
            self.force_exit = self.should_exit
            super().handle_exit(sig, frame)

    return Stopping(config)


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process once what was opened in the context is closed."""

    def terminate(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)


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
    name: Annotated[str, typer.Option(help="A name for the key.")],
    tenant: Annotated[str, typer.Option(help="The tenant that the key belongs to.")],
    per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let this key see the figures of all tenants.")] = False,
) -> None:
    """Create a key and print it, once; the file holds only its digest."""
    from cacheblend_serve.auth import KeyFile, Owner

    typer.echo(KeyFile(file).add(Owner(tenant, name, per_minute, admin)))


@keys_app.command("remove")
def remove_key(file: KeysArgument, name: Annotated[str, typer.Argument(help="The key's name.")]) -> None:
    """Revoke a key; servers notice with the next request."""
    from cacheblend_serve.auth import KeyFile

    KeyFile(file).remove(name)


@keys_app.command("list")
def list_keys(file: KeysArgument) -> None:
    """List the keys and their tenants."""
    from cacheblend_serve.auth import KeyFile

    rows = [(owner.name, owner.tenant, owner.per_minute, "yes" if owner.is_admin else "") for owner in KeyFile(file)]
    show_table(f"{len(rows)} keys", ("name", "tenant", "a minute", "all figures"), rows, text_columns=2)
