"""Who asks, and what they share: the backend, the keys, the limits."""

from __future__ import annotations

import asyncio
import base64
import logging
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from cacheblend_attachments import Guard
from cacheblend_rag.engine import BlendEngine, ChunkLibrary
from cacheblend_rag.errors import ConfigError
from cacheblend_serve.auth import OPEN, KeyFile, Owner
from cacheblend_serve.backend import Backend
from cacheblend_serve.errors import Denied
from cacheblend_serve.limits import Gate, Overload, Rates
from cacheblend_serve.pages import KeptPages
from cacheblend_serve.settings import LOOPBACK, ServeConfig
from cacheblend_serve.spans import RequestSpans

__all__ = ["Asker", "FromAsker", "Server", "in_thread"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
# Threads for what passes no gate: who asks, whether the server is ready.
_SPARE_THREADS = 16
# Who waits for all that was added in the background to be stored, at the same time.
_FLUSHES = 8


class Server:
    """What all addresses share."""

    def __init__(self, backend: Backend, config: ServeConfig) -> None:
        self.config = config
        self.backend = backend
        self.gate = Gate(config.requests)
        self.pages = KeptPages(config.pages_s)
        self._rates = Rates()
        self._keys = None if config.keys is None else KeyFile(config.keys)
        if self._keys is not None:
            self._keys.check()
        if config.guard_share:
            first = backend.library(None)
            if not isinstance(first, BlendEngine):
                raise ConfigError(
                    f"guard_share={config.guard_share}: only answers of the backend 'engine' are compared"
                )
            first.attach(Guard(config.guard_share, action=config.guard_action))
        # One writer of a document at a time.
        self._writers: weakref.WeakValueDictionary[tuple[str | None, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._begun: set[asyncio.Task[Any]] = set()
        # Whoever waits for what is encoded takes no thread from those that are answered.
        self._flushing = anyio.CapacityLimiter(_FLUSHES)

    def start(self) -> None:
        """Have a thread for each request that is answered, and some for all else that is asked; called in the event loop."""
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = max(limiter.total_tokens, self.config.requests + _SPARE_THREADS)

    def stop(self) -> None:
        """Let nobody in any more, wait for the answers that are written, and close what was made for tenants."""
        self.gate.drain(self.config.drain_s)
        self.backend.close()

    async def flush(self, library: ChunkLibrary) -> None:
        """Wait until what was added to a library in the background is stored; a few at a time, the others wait for these."""
        await anyio.to_thread.run_sync(library.flush, limiter=self._flushing)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begin work that goes on to its end, whoever waits for it; what goes wrong when nobody does, asyncio logs."""
        task = asyncio.create_task(work)
        # The event loop itself would let go of it.
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    def check_host(self, host: str) -> None:
        """Raise `HTTPException` if a request is for another host than this machine, and there are no keys.

        Otherwise a web page could ask here whatever it likes, once its own name leads to this machine.
        """
        if self._keys is None and _without_port(host) not in LOOPBACK:
            raise HTTPException(
                403,
                f"this server has no keys and answers as {', '.join(LOOPBACK)} only, not as {host!r:.80}; ask it by one of these "
                "names, or start it with keys",
            )

    def owner(self, authorization: str | None, is_page: bool = False) -> Owner:
        """Return who asks; `Denied` if nobody knows the key, `Overload` if it asks too often."""
        owner = OPEN if self._keys is None else self._key_owner(self._keys, authorization or "", is_page)
        self._rates.take(owner.digest, owner.per_minute or self.config.per_minute)
        return owner

    def _key_owner(self, keys: KeyFile, authorization: str, is_page: bool) -> Owner:
        kind, _, given = authorization.partition(" ")
        key = given.strip() if kind.lower() == "bearer" else _password(given) if is_page else None
        try:
            owner = None if key is None else keys.owner(key)
        except ConfigError as error:
            logger.error("nobody is let in: %s", error)
            raise Overload("who may ask cannot be read now; the server's log says why", 5, is_rate=False) from error
        if owner is None:
            # A browser asks for a name and a password, which is the key.
            schemes = 'Basic realm="cacheblend-rag"' if is_page else "Bearer"
            raise Denied("this server answers those who have a key; send it as Authorization: Bearer KEY", schemes)
        return owner

    def writer(self, tenant: str | None, document: str) -> asyncio.Lock:
        """Return the lock of a document."""
        return self._writers.setdefault((tenant, document), asyncio.Lock())


class Asker:
    """Who asks, and what they see: their tenant's chunks."""

    def __init__(self, server: Server, owner: Owner, request: Request) -> None:
        self.server = server
        self.owner = owner
        self.spans = RequestSpans(request.url.path.removeprefix("/v1/"), request.headers)

    async def library(self) -> ChunkLibrary:
        """Return the tenant's chunks, for which something may have to be made first."""
        return await in_thread(self.server.backend.library, self.owner.tenant)

    async def of_library(self, work: Callable[[ChunkLibrary], Result]) -> Result:
        """Return what `work` returns of the tenant's chunks, as `in_thread` does."""
        return await in_thread(lambda: work(self.server.backend.library(self.owner.tenant)))


async def _asker(request: Request) -> Asker:
    return Asker(request.app.state.server, request.state.owner, request)


FromAsker = Annotated[Asker, Depends(_asker)]
"""The parameter of an address by which it knows who asks."""


def _without_port(host: str) -> str:
    """Return the name or the address in a Host header."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _password(given: str) -> str | None:
    """Return the password of HTTP's basic authentication; None where there is none."""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2] or None
    except ValueError:
        return None


async def in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `work` returns; who else is served goes on being served meanwhile."""
    # Tokenizers, disks and models are waited for outside of the loop that serves all clients.
    return await anyio.to_thread.run_sync(partial(work, *arguments))
