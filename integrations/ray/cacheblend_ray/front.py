"""The front: takes requests over HTTP, sees what each names, and passes it on to the replica that the router chooses."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from typing import Any, cast

import anyio
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cacheblend_rag.errors import AnswerTimeoutError, BackendError
from cacheblend_ray.nearness import ANSWERING, Call, names_in
from cacheblend_serve.errors import Overload, explained
from cacheblend_serve.settings import ServeConfig

__all__ = ["Front"]

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
# A request whose replica died before it said anything is sent to another; who kills each of them is not sent on for ever.
_MOST_TRIES = 3
# Beyond the time of an answer itself, for a replica that has to be started.
_START_S = 60.0


class Front:
    """Passes requests on to replicas, and what they send back to who asked.

    Parameters
    ----------
    replicas : DeploymentHandle
        The replicas.
    config : ServeConfig
        The server's settings.
    """

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._replicas = replicas.options(stream=True)
        self._config = config

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            call = await self._read(request)
            messages, rest = await self._begin(call)
            return _response(call, messages, rest)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return explained(error)

    async def _read(self, request: Request) -> Call:
        """Return a request, read whole."""
        body = bytearray()
        try:
            with anyio.fail_after(self._config.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > self._config.body_bytes:
                        raise HTTPException(
                            413,
                            f"the request is larger than the {self._config.body_bytes} bytes that are taken; send less at once",
                        )
        except TimeoutError:
            raise HTTPException(
                408, f"the request did not arrive within {self._config.body_s:g} s; send less at once"
            ) from None
        scope = request.scope
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        client = None if request.client is None else (request.client.host, request.client.port)
        names = names_in(request.method, path, bytes(body))
        raw = scope.get("raw_path") or path.encode()
        return Call(
            request.method, path, raw, scope["query_string"], list(scope["headers"]), bytes(body), client, names
        )

    async def _begin(self, call: Call) -> tuple[Messages, DeploymentResponseGenerator[Messages]]:
        """Return the first messages of a replica, and the others; another is asked if it dies before."""
        for trial in range(1, _MOST_TRIES + 1):
            stream = cast("DeploymentResponseGenerator[Messages]", self._replicas.answer.remote(call))
            try:
                # What stores, and says nothing before its end, takes as long as it takes.
                longest_s = self._config.timeout_s + _START_S if call.path in ANSWERING else math.inf
                with anyio.fail_after(longest_s):
                    return await anext(stream), stream
            except BackPressureError as error:
                raise Overload(
                    "too many requests wait to be answered; ask again in a moment", 1, is_rate=False
                ) from error
            except TimeoutError:
                stream.cancel()
                raise AnswerTimeoutError("no replica answered in time; try again later") from None
            except RayActorError as error:
                # What was deleted before its replica died is not there to be deleted once more.
                if trial == _MOST_TRIES or call.method == "DELETE":
                    raise BackendError(f"the replica that was asked has ended: {error}") from error
                logger.warning("a replica ended before it answered, another is asked: %s", error)
            except (RayError, RayServeException, StopAsyncIteration) as error:
                raise BackendError(f"the replica that was asked has failed: {error}") from error
            except asyncio.CancelledError:
                stream.cancel()
                raise
        raise AssertionError("the last try raises")


def _response(call: Call, first: Messages, rest: DeploymentResponseGenerator[Messages]) -> Response:
    start, *others = first
    body = b"".join(message.get("body", b"") for message in others)
    if others and not others[-1].get("more_body", False):
        response = Response(body, start["status"])
    else:
        is_events = any(name == b"content-type" and b"event-stream" in value for name, value in start["headers"])
        response = StreamingResponse(_parts(body, rest, is_events), start["status"])
    response.raw_headers = [*start["headers"], (b"x-cacheblend-routed", call.why.encode())]
    return response


async def _parts(
    body: bytes, rest: DeploymentResponseGenerator[Messages], is_events: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a body; where its replica ends before it does, an event says so."""
    ended = False
    try:
        if body:
            yield body
        async for messages in rest:
            yield b"".join(message.get("body", b"") for message in messages)
        ended = True
    except (RayError, RayServeException) as error:
        ended = True
        if not is_events:
            raise BackendError(f"the replica that answered has ended: {error}") from error
        said = bytes(explained(BackendError(f"the replica that answered has ended: {error}")).body).decode()
        yield f"data: {said}\n\ndata: [DONE]\n\n".encode()
    finally:
        if not ended:
            rest.cancel()
