"""A replica: the server's application over an engine of its own, asked by handle instead of over a socket."""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ray import serve

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_ray.nearness import Call, HeldNames, name_number
from cacheblend_ray.settings import AppArgs, AppSettings
from cacheblend_serve.app import make_app
from cacheblend_serve.backend import Wanted, backend_module

__all__ = ["Replica", "own_folder"]

# How long an abandoned answer may take to end.
_END_S = 10.0
# What a disk holds where settings leave it to the disk; names are what is counted then.
_DISK_BYTES = 2**40
_MOST_REPLICAS = 1000


class Replica:
    """Answers with an engine in RAM and a folder of its own, over the tier that all replicas share.

    It is there once its engine is, and the model's KV has passed its check.

    Parameters
    ----------
    args : AppArgs
        What `build_app` was given.
    settings : AppSettings
        What its settings came to.
    """

    def __init__(self, args: AppArgs, settings: AppSettings) -> None:
        self._opened = ExitStack()
        self._is_running = False
        context = serve.get_replica_context()
        # A file for `serve deploy` may say so beside the arguments, where `build_app` does not see it.
        settings.check_replicas(_most_replicas(context))
        self._home = context.replica_id.unique_id
        with ExitStack() as opened:
            folder: Path | None = None
            if args.store is not None:
                folder, self._home = opened.enter_context(own_folder(args.store))
            config = settings.engine
            wanted = Wanted(args.model, folder, config, settings.blend, arguments=args.arguments)
            self._backend = opened.enter_context(backend_module(args.backend).open_backend(wanted))
            library = self._backend.library(None)
            disk_bytes = 0 if folder is None else config.disk_bytes or _DISK_BYTES
            self._held = held = HeldNames(config.ram_bytes, disk_bytes)
            token_bytes = library.kv_bytes_per_token or 1

            def note(library: ChunkLibrary, answer: Answer) -> None:
                held.note(library, [(each.id, each.tokens * token_bytes) for each in answer.report.chunks if each.id])

            self._app = make_app(self._backend, settings.serve, note)
            opened.callback(self._app.state.server.stop)
            self._opened = opened.pop_all()
        self._shown = f"{name_number(self._home):016x}"[:8].encode()

    async def answer(self, call: Call) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield what the application sends, as ASGI's messages, as many at a time as there are."""
        if not self._is_running:
            # In the loop that answers, which there is not yet when this object is made.
            self._app.state.server.start()
            self._is_running = True
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        bodies = [call.body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                told = (b"x-cacheblend-replica", self._shown)
                message = {**message, "headers": [*message.get("headers", []), told]}
            messages.put_nowait(message)

        work = asyncio.ensure_future(self._app(_scope(call), receive, send))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                ready = [message]
                while not messages.empty() and (more := messages.get_nowait()) is not None:
                    ready.append(more)
                yield ready
                if work.done() and messages.empty():
                    break
            await work
        finally:
            # Who has left is told so, as a server over a socket tells it: the answer ends at the next token.
            is_gone.set()
            try:
                await asyncio.shield(asyncio.wait([work], timeout=_END_S))
            finally:
                work.cancel()

    async def check_health(self) -> None:
        """Raise `BackendError` if it cannot answer; Ray Serve then puts another in its place."""
        if not await asyncio.to_thread(self._backend.is_ready):
            raise BackendError("the model of this replica cannot answer; its log says why")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router is told of this replica: the names of what it holds, as numbers."""
        return self._held.told()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what the router calls this replica, and the one that comes after it in the same folder."""
        return {"home": self._home}

    def __del__(self) -> None:
        """Write what waits to be written; Ray Serve calls it once all is answered."""
        if hasattr(self, "_opened"):
            self._opened.close()


def _most_replicas(context: serve.context.ReplicaContext) -> int:
    """Return how many replicas there may be, as Ray Serve has it."""
    scaling = context._deployment_config.autoscaling_config
    return context.world_size if scaling is None else int(scaling.max_replicas)


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": call.method,
        "path": call.path,
        "raw_path": call.raw_path,
        "root_path": "",
        "query_string": call.query,
        "headers": call.headers,
        "client": call.client,
        "server": None,
        "state": {},
    }


@contextmanager
def own_folder(root: Path) -> Iterator[tuple[Path, str]]:
    """Have the first folder below `root` that no other process of this machine has, for the time of a ``with`` block.

    Beside it comes what its replica is called from start to start: the machine and the folder's number.

    Raises
    ------
    ConfigError
        If none can be had.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MOST_REPLICAS):
            with open(root / f"replica-{number}.lock", "w", encoding="ascii") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield root / f"replica-{number}", f"{socket.gethostname()}/{number}"
                return
    except OSError as error:
        raise ConfigError(f"folder {root} cannot be written: {error.strerror}") from error
    raise ConfigError(f"all {_MOST_REPLICAS} folders below {root} are in use; give another folder")
