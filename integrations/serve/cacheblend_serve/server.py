"""What all addresses share: the backend, the keys, the limits of requests a minute and of answers at the same time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Depends, Request
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.exceptions import HTTPException

from cacheblend_attachments import CompareAnswers
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.engine import BlendEngine, ChunkLibrary
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_serve.auth import OPEN, KeyFile, Owner
from cacheblend_serve.backend import Backend
from cacheblend_serve.errors import Denied, Overload
from cacheblend_serve.settings import LOOPBACK, ServeConfig

__all__ = ["FromLibrary", "FromServer", "Gate", "Server", "in_thread"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Threads for what passes no gate: who asks, whether the server is ready.
_SPARE_THREADS = 16
# How often a server that stops looks whether all is answered.
_POLL_S = 0.02
# Who waits for all that was added in the background to be stored, at the same time.
_FLUSHES = 8


class Server:
    """State that all addresses share."""

    def __init__(self, backend: Backend, config: ServeConfig) -> None:
        self.config = config
        self.backend = backend
        self.gate = Gate(config.requests)
        self._rates = MovingWindowRateLimiter(MemoryStorage())
        self._keys = None if config.keys is None else KeyFile(config.keys)
        if self._keys is not None:
            self._keys.check()
        if config.compare_every is not None:
            if not isinstance(first := backend.library(None), BlendEngine):
                raise ConfigError("compare_every is for models of transformers in this process; leave it out")
            first.attach(CompareAnswers(config.compare_every))
        # One writer of a document at a time: what is sent last stands at the end.
        self._writers: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._begun: set[asyncio.Task[Any]] = set()
        # Requests that wait for encoding take no thread from those that are answered.
        self._flushing = anyio.CapacityLimiter(_FLUSHES)

    def start(self) -> None:
        """Have a thread for each request that is answered, and some for all else that is asked; called in the event loop."""
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = max(limiter.total_tokens, self.config.requests + _SPARE_THREADS)

    def stop(self) -> None:
        """Refuse further requests, wait for the answers that are written, and close what was made for tenants."""
        self.gate.drain(self.config.drain_s)
        self.backend.close()

    async def flush(self, library: ChunkLibrary) -> None:
        """Wait until what was added to a library in the background is stored; a few at a time, the others wait for these."""
        await anyio.to_thread.run_sync(library.flush, limiter=self._flushing)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begin work that goes on to its end, even if its client leaves; asyncio then logs what goes wrong."""
        task = asyncio.create_task(work)
        # The event loop itself would let go of it.
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    def check_host(self, host: str) -> None:
        """Refuse a request for another host than this machine, if there are no keys.

        Otherwise a web page could ask here whatever it likes, once its own name leads to this machine.
        """
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()
        if self._keys is None and name not in LOOPBACK:
            raise HTTPException(
                403,
                f"this server has no keys and answers as {', '.join(LOOPBACK)} only, not as {host!r:.80}; ask it by one of these "
                "names, or start it with keys",
            )

    def owner(self, authorization: str | None) -> Owner:
        """Return who asks; `Denied` if the key is unknown, `Overload` if it is used too often."""
        owner = OPEN if self._keys is None else self._key_owner(self._keys, authorization or "")
        if (per_minute := owner.per_minute or self.config.per_minute) is not None:
            limit = RateLimitItemPerMinute(per_minute)
            if not self._rates.hit(limit, owner.digest):
                reset_s = self._rates.get_window_stats(limit, owner.digest).reset_time - time.time()
                text = f"this key has had its {per_minute} requests of a minute; ask again later, or ask for a larger share"
                raise Overload(text, reset_s, is_rate=True)
        return owner

    def _key_owner(self, keys: KeyFile, authorization: str) -> Owner:
        kind, _, given = authorization.partition(" ")
        try:
            owner = keys.owner(given.strip()) if kind.lower() == "bearer" else None
        except ConfigError as error:
            logger.error("all requests are refused: %s", error)
            raise Overload("who may ask cannot be read now; the server's log says why", 5) from error
        if owner is None:
            raise Denied("this server answers those who have a key; send it as Authorization: Bearer KEY")
        return owner

    def writer(self, library: ChunkLibrary, document: str) -> asyncio.Lock:
        """Return the lock of a document."""
        return self._writers.setdefault((library.namespace, document), asyncio.Lock())


async def _server(request: Request) -> Server:
    known = [each.alias for each in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = did_you_mean(name[:60], known) or "; leave it out"
            raise HTTPException(400, f"the parameter {name!r:.60} of the address is not supported here{hint}")
    server: Server = request.app.state.server
    return server


FromServer = Annotated[Server, Depends(_server)]
"""The parameter of an address by which it gets what all share; unknown parameters of a request's address are refused."""


def _library(request: Request, server: FromServer) -> ChunkLibrary:
    return server.backend.library(request.state.owner.tenant)


FromLibrary = Annotated[ChunkLibrary, Depends(_library)]
"""The parameter of an address by which it gets the chunks of the tenant that asks; the first time it may take a while."""


async def in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `work` returns; who else is served goes on being served meanwhile."""
    # Tokenizers, disks and models are waited for outside of the loop that serves all clients.
    return await anyio.to_thread.run_sync(partial(work, *arguments))


class Gate:
    """Lets a number of requests in at the same time, and none once it is closed; all but `drain` are the event loop's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside = 0
        self._closed_at = math.inf

    @property
    def is_open(self) -> bool:
        """Whether requests are let in, if there is room."""
        return self._closed_at == math.inf

    @contextmanager
    def pass_through(self, places: int = 1) -> Iterator[None]:
        """Be inside for the time of a ``with`` block, in the places of that many requests; `Overload` if they are not free."""
        if places > self._most:
            raise PromptError(
                f"the request has {places} prompts, and this server answers {self._most} at the same time; send fewer at once"
            )
        if not self.is_open:
            raise Overload("this server is about to stop; ask another one, or the same in a moment", 5)
        if self._inside + places > self._most:
            busy = f"{self._inside} requests are being answered, of {self._most} at the same time"
            raise Overload(f"{busy}; ask again in a moment", 1)
        self._inside += places
        try:
            yield
        finally:
            self._inside -= places

    def close(self) -> None:
        """Refuse further requests."""
        self._closed_at = min(self._closed_at, time.monotonic())

    def drain(self, most_s: float) -> None:
        """Close, and wait at most `most_s` seconds for those inside."""
        self.close()
        while self._inside and time.monotonic() < self._closed_at + most_s:
            time.sleep(_POLL_S)
