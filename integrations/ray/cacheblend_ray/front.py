"""The front: takes requests over HTTP, sees what each names, and passes it on to the replica that the router chooses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cacheblend_rag.errors import BackendError
from cacheblend_ray.call import Call, names_in
from cacheblend_serve.errors import explained
from cacheblend_serve.settings import ServeConfig

__all__ = ["Front"]

logger = logging.getLogger(__name__)

# A request whose replica died before it said anything is sent to another; who kills each of them is not sent on for ever.
_MOST_TRIES = 3


class Front:
    """Passes requests on to replicas, and what they send back to who asked."""

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._replicas = replicas.options(stream=True)
        self._config = config

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            call = await self._read(request)
            (status, headers), parts = await self._begin(call)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return explained(error)
        is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
        if is_stream:
            response: Response = StreamingResponse(_events(parts), status)
        else:
            try:
                response = Response(b"".join([part async for part in parts]), status)
            except (RayError, RayServeException) as error:
                return explained(BackendError(f"the replica that answered has ended: {error}"))
        response.raw_headers = [*headers, (b"x-cacheblend-routed", call.why.encode())]
        return response

    async def _read(self, request: Request) -> Call:
        """Return a request, read whole."""
        config, body = self._config, bytearray()
        try:
            with anyio.fail_after(config.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > config.body_bytes:
                        raise HTTPException(
                            413, f"the request is larger than {config.body_bytes} bytes; send less at once"
                        )
        except TimeoutError:
            raise HTTPException(
                408, f"the request did not arrive within {config.body_s:g} s; send less at once"
            ) from None
        # What a replica is sent must be plain data.
        kept = ("type", "asgi", "http_version", "scheme", "method", "query_string", "client")
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        scope = {name: request.scope.get(name) for name in kept} | {"headers": list(request.scope["headers"])}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "server": None, "state": {}}
        return Call(scope, bytes(body), names_in(request.method, path, bytes(body)))

    async def _begin(self, call: Call) -> tuple[Any, DeploymentResponseGenerator[Any]]:
        """Return the status and headers of a replica's answer, and its body; another is asked if it dies before."""
        for trial in range(1, _MOST_TRIES + 1):
            parts = cast("DeploymentResponseGenerator[Any]", self._replicas.answer.remote(call))
            try:
                return await anext(parts), parts
            except RayActorError as error:
                # What was deleted before its replica died is not there to be deleted once more.
                if trial == _MOST_TRIES or call.scope["method"] == "DELETE":
                    raise BackendError(f"the replica that was asked has ended: {error}") from error
                logger.warning("a replica ended before it answered, another is asked: %s", error)
            except (RayError, RayServeException, StopAsyncIteration) as error:
                raise BackendError(f"the replica that was asked has failed: {error}") from error
        raise AssertionError("the last try raises")


async def _events(parts: DeploymentResponseGenerator[Any]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream; where its replica ends before it does, an event says so."""
    try:
        async for part in parts:
            yield part
    except (RayError, RayServeException) as error:
        said = bytes(explained(BackendError(f"the replica that answered has ended: {error}")).body).decode()
        yield f"data: {said}\n\ndata: [DONE]\n\n".encode()
    finally:
        parts.cancel()
