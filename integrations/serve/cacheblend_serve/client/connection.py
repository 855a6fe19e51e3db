"""Asking a server: requests, streams of events, and what goes wrong as our own errors."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from cacheblend_rag.errors import (
    AnswerTimeoutError,
    BackendError,
    CacheBlendError,
    ConfigError,
    EmptyChunkError,
    PromptError,
    PromptTooLongError,
    StoreError,
    StructuredOutputError,
    UnknownChunkError,
)
from cacheblend_serve.settings import LOOPBACK

__all__ = ["KINDS", "Connection"]

# A server that has nothing to say yet gives a sign of life every second.
_CONNECT_S, _READ_S = 10.0, 60.0
# How long a server that is busy is asked again.
_PATIENCE_S = 60.0
_POLL_S = 0.1
# Less than a server keeps an idle connection.
_IDLE_S = 3.0
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
KINDS: dict[str, type[CacheBlendError]] = {
    "timeout": AnswerTimeoutError,
    "unknown_chunk": UnknownChunkError,
    "context_length_exceeded": PromptTooLongError,
    "empty_chunk": EmptyChunkError,
    "invalid_prompt": PromptError,
    "invalid_option": ConfigError,
    "unfinished_answer": StructuredOutputError,
    "store_error": StoreError,
}
"""Errors by the code that a server tells them with, the first that fits."""
_END = "[DONE]"


class Connection:
    """A server's address, with ``/v1`` or without; while it is busy it is asked again, for a minute."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = httpx.URL(self.url)
        except httpx.InvalidURL:
            parts = httpx.URL("")
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
            raise ConfigError(
                f"server={url.rpartition('@')[2]!r:.80} is not a server address; give one like http://127.0.0.1:8000, the key "
                "in CACHEBLEND_SERVER_KEY"
            )
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"}),
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            # No proxy between two programs of one machine.
            trust_env=parts.host not in LOOPBACK,
        )
        # Frameworks' objects that hold a server are never closed.
        weakref.finalize(self, self._client.close)

    def read(self, path: str, body: Any = None, **parameters: Any) -> Any:
        """Return what stands at an address, or what a body that is sent there is answered by, read as JSON."""
        reply = self.reply(path, body, **parameters)
        try:
            return reply.json()
        except ValueError as error:
            raise _stranger(reply) from error

    def reply(self, path: str, body: Any = None, **parameters: Any) -> httpx.Response:
        """Return what stands at an address, or what a body that is sent there is answered by."""
        with self._asked(path, None if body is None else lambda: body, params=parameters) as reply:
            reply.read()
        return reply

    def events(
        self,
        path: str,
        body: Callable[[], Any],
        is_over: Callable[[], bool] = lambda: False,
        patience_s: float = _PATIENCE_S,
    ) -> Generator[Any, None, None]:
        """Yield the events that a request is answered by; who leaves the loop ends the answer.

        The body is made each time that it is sent. Once it `is_over`, there are no more events, and nothing is sent again.
        """
        with self._asked(path, body, is_over, patience_s) as reply:
            # Comments are lines too, by which it is noticed soon that an answer is over.
            for line in reply.iter_lines():
                if is_over():
                    return
                data = line.removeprefix("data: ")
                if data == _END:
                    return
                if data == line:
                    continue
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise _said(event["error"])
                yield event
            raise BackendError(f"the server at {self.url} cut an answer off; try again")

    def close(self) -> None:
        """Let go of the server."""
        self._client.close()

    @contextmanager
    def _asked(
        self,
        path: str,
        body: Callable[[], Any] | None,
        is_over: Callable[[], bool] = lambda: False,
        patience_s: float = _PATIENCE_S,
        **more: Any,
    ) -> Iterator[httpx.Response]:
        """Give the reply to a request, which is made again as long as a busy server says when."""
        until = time.monotonic() + min(patience_s, _PATIENCE_S)
        while not is_over():
            method, content = ("GET", None) if body is None else ("POST", json.dumps(body()))
            with self._reached(), self._client.stream(method, path, content=content, **more) as reply:
                if reply.is_success:
                    yield reply
                    return
                reply.read()
            wait_s = float(said) if (said := reply.headers.get("Retry-After", "")).isdigit() else 0.0
            begun = time.monotonic()
            if reply.status_code not in _BUSY or not wait_s or begun + wait_s > until:
                raise _error(reply)
            while (left_s := begun + wait_s - time.monotonic()) > 0 and not is_over():
                time.sleep(min(left_s, _POLL_S))
        raise CacheBlendError("the answer was cut off; try again")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        if self._client.is_closed:
            raise ConfigError(f"the engine of the server at {self.url} is closed; make a new one")
        try:
            yield
        except httpx.HTTPError as error:
            raise BackendError(
                f"the server at {self.url} cannot be reached ({type(error).__name__}: {error}); check that it is running"
            ) from error


def _error(reply: httpx.Response) -> CacheBlendError:
    try:
        said = dict(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return _stranger(reply)
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        return ConfigError(
            f"{said.get('message')}; give the key in CACHEBLEND_SERVER_KEY, or as ServedEngine(url, key)"
        )
    if reply.status_code == httpx.codes.NOT_FOUND and not said.get("code"):
        return _stranger(reply)
    return _said(said)


def _said(said: dict[str, Any]) -> CacheBlendError:
    kind = KINDS.get(said.get("code") or "")
    if kind is None:
        kind = PromptError if said.get("type") == "invalid_request_error" else BackendError
    return kind(said.get("message", "the server does not say what was wrong"))


def _stranger(reply: httpx.Response) -> BackendError:
    return BackendError(
        f"{reply.url} answered with status {reply.status_code}: it is not a cacheblend-rag server; check the address"
    )
