"""A replica: the server's application over an engine of its own, asked by handle instead of over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ray import serve

from cacheblend_rag.errors import BackendError
from cacheblend_ray.call import Call
from cacheblend_serve.app import make_app
from cacheblend_serve.backend import Wanted, backend_module
from cacheblend_serve.settings import ServeConfig

__all__ = ["Replica"]

# How long an abandoned answer may take to end.
_END_S = 10.0


class Replica:
    """Answers with an engine in RAM and a folder of its own, over the tier that all replicas share.

    It is there once its engine is, and the model's KV has passed its check. The folder that is wanted as store has those of all
    replicas of a machine.
    """

    def __init__(self, backend: str | None, wanted: Wanted, config: ServeConfig) -> None:
        self._opened = ExitStack()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id.encode()
        if wanted.store is not None:
            # One that takes the place of another finds what that one had.
            wanted = replace(wanted, store=wanted.store / f"replica-{context.rank.rank}")
        with ExitStack() as opened:
            self._backend = opened.enter_context(backend_module(backend).open_backend(wanted))
            self._app = make_app(self._backend, config)
            opened.callback(self._app.state.server.stop)
            self._opened = opened.pop_all()

    async def answer(self, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the status and headers of what the application answers, then its body, part by part."""
        # In the loop that answers, which there is not yet when this object is made.
        self._app.state.server.start()
        messages: asyncio.Queue[Any] = asyncio.Queue()
        is_gone = asyncio.Event()
        bodies = [call.body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(call.scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], (b"x-cacheblend-replica", self._name)]
                elif message.get("body"):
                    yield message["body"]
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

    def __del__(self) -> None:
        """Write what waits to be written; Ray Serve calls it once all is answered."""
        if hasattr(self, "_opened"):
            self._opened.close()
