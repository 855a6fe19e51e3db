"""vLLM's server, asked over HTTP: for answers piece by piece, and for prompts that it computes for the store."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx

from cacheblend_rag.errors import AnswerTimeoutError, BackendError, PromptError
from vllm_cacheblend.asking import spool_params
from vllm_cacheblend.proving import NUM_LOGPROBS, Said

__all__ = ["TimeLimit", "VLLMClient"]

Result = TypeVar("Result")

_COMPLETIONS = "/v1/completions"
_DATA, _END = "data: ", "data: [DONE]"
# Requests of ours that vLLM batches at a time, besides its users'.
_AT_ONCE = 16
# Users' requests have priority 0; vLLM takes the lowest first.
_LATER = 10
_CONNECT_S, _WARM_S = 10.0, 600.0
_SAID_CHARS = 300


class TimeLimit:
    """The time that an answer may take, from now on, in all that is waited for.

    Parameters
    ----------
    timeout_s : float
        Seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = anyio.current_time() + timeout_s

    async def wait(self, awaited: Awaitable[Result]) -> Result:
        """Return what is awaited.

        Raises
        ------
        AnswerTimeoutError
            If it is not there in time.
        """
        with anyio.CancelScope(deadline=self._until):
            return await awaited
        raise AnswerTimeoutError(
            f"the answer was not finished after {self._timeout_s:g} s; give it more time, or request fewer tokens"
        )


class VLLMClient:
    """Asks one server; made for any number of threads and tasks of one event loop.

    Parameters
    ----------
    address : str or Path
        Its URL, without ``/v1``, or the unix socket that it listens at.
    key : str, optional
        The key that it was started with.
    """

    def __init__(self, address: str | Path, key: str | None = None) -> None:
        socket = str(address) if isinstance(address, Path) else None
        options: dict[str, Any] = {
            "base_url": str(address).rstrip("/") if socket is None else "http://vllm",
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
        }
        # How many are answered at once is the server's to say.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_AT_ONCE)
        # With transports of their own they go through no proxy that the environment names.
        one, other = httpx.HTTPTransport(uds=socket, limits=limits), httpx.AsyncHTTPTransport(uds=socket, limits=limits)
        self._address = address
        self._sync = httpx.Client(transport=one, timeout=httpx.Timeout(_WARM_S, connect=_CONNECT_S), **options)
        self._async = httpx.AsyncClient(transport=other, timeout=httpx.Timeout(None, connect=_CONNECT_S), **options)
        self._model: dict[str, Any] | None = None

    def is_up(self) -> bool:
        """Whether the server answers."""
        try:
            return self._sync.get("/health", timeout=_CONNECT_S).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def model(self) -> dict[str, Any]:
        """Return what the server says of the model that it serves: its `id` and `max_model_len`, among others.

        Raises
        ------
        BackendError
            If the server cannot be asked.
        """
        if self._model is None:
            try:
                reply = self._sync.get("/v1/models", timeout=_CONNECT_S)
                reply.raise_for_status()
                self._model = dict(reply.json()["data"][0])
            except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
                raise BackendError(
                    f"vLLM cannot be reached at {self._address} ({type(error).__name__}: {error}); check that it is running, "
                    "with the key in VLLM_API_KEY"
                ) from error
        return self._model

    def warm(self, prompts: Sequence[tuple[str, tuple[int, ...]]], salt: str, is_awaited: bool) -> None:
        """Have prompts computed whose KV is then in the spool; see `vllm_cacheblend.encoding.Warm`.

        Raises
        ------
        BackendError
            If the server cannot be asked.
        PromptError
            If it refuses a prompt.
        """

        def ask(name: str, ids: tuple[int, ...]) -> None:
            self._post(
                {
                    "prompt": list(ids),
                    "max_tokens": 1,
                    "temperature": 0,
                    "priority": 0 if is_awaited else _LATER,
                    "cache_salt": salt,
                    "kv_transfer_params": spool_params(name),
                }
            )

        if len(prompts) == 1:
            ask(*prompts[0])
            return
        with ThreadPoolExecutor(min(_AT_ONCE, len(prompts)), "cacheblend-warm") as pool:
            list(pool.map(lambda prompt: ask(*prompt), prompts))

    def probe(self, ids: Sequence[int], salt: str, params: dict[str, Any]) -> Said:
        """Ask for one token with its log probabilities; see `vllm_cacheblend.proving.Probe`.

        Raises
        ------
        BackendError
            If the server cannot be asked.
        PromptError
            If it refuses the prompt.
        """
        reply = self._post(
            {
                "prompt": list(ids),
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": NUM_LOGPROBS,
                "return_tokens_as_token_ids": True,
                "cache_salt": salt,
                "kv_transfer_params": params,
            }
        )
        [choice] = reply["choices"]
        cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        return Said(choice["logprobs"]["top_logprobs"][0], cached)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._sync.post(_COMPLETIONS, json=body | {"model": self.model()["id"]})
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _check(reply.status_code, reply.text)
        said: dict[str, Any] = reply.json()
        return said

    async def stream(self, body: dict[str, Any], limit: TimeLimit) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed completion; who leaves the generator ends the answer.

        Parameters
        ----------
        body : dict
            The request, without `model` and `stream`.
        limit : TimeLimit
            The time that the answer has left.

        Raises
        ------
        AnswerTimeoutError
            If it takes longer.
        BackendError
            If the server cannot be asked, or breaks off.
        PromptError
            If it refuses the prompt.
        """
        reply = await limit.wait(self._begin(body))
        async with aclosing(reply):
            lines = _lines(reply)
            while (line := await limit.wait(self._next(lines))) != _END:
                if line.startswith(_DATA):
                    yield _event(line)

    async def _begin(self, body: dict[str, Any]) -> httpx.Response:
        """Return the reply to a streamed completion, of which no more is read than that it is one."""
        asked = body | {"model": self.model()["id"], "stream": True, "stream_options": {"include_usage": True}}
        request = self._async.build_request("POST", _COMPLETIONS, json=asked)
        try:
            reply = await self._async.send(request, stream=True)
            said = "" if reply.status_code == httpx.codes.OK else (await reply.aread()).decode(errors="replace")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _check(reply.status_code, said)
        return reply

    async def _next(self, lines: AsyncIterator[str]) -> str:
        try:
            return await anext(lines)
        except (httpx.TransportError, StopAsyncIteration) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> BackendError:
        return BackendError(
            f"vLLM at {self._address} cannot be reached, or broke off ({type(error).__name__}: {error})"
        )

    def close(self) -> None:
        """Close the connections of this thread; those of the event loop close with their answers."""
        self._sync.close()


async def _lines(reply: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream of events; httpx's own end at U+2028 and others too, which JSON leaves as they are."""
    rest = b""
    async for piece in reply.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")


def _event(line: str) -> dict[str, Any]:
    """Return what a line of a stream says."""
    try:
        event: dict[str, Any] = json.loads(line.removeprefix(_DATA))
    except ValueError as error:
        raise BackendError(f"vLLM sent {line!r:.{_SAID_CHARS}}, which is not an event") from error
    if "error" in event:
        raise BackendError(f"vLLM broke off: {event['error']!s:.{_SAID_CHARS}}")
    return event


def _check(status: int, said: str) -> None:
    """Raise what a reply without an answer means."""
    if status == httpx.codes.OK:
        return
    try:
        message = str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = said
    if 400 <= status < 500 and status not in (401, 403, 404, 429):
        raise PromptError(f"vLLM refuses this: {message:.{_SAID_CHARS}}")
    raise BackendError(f"vLLM answers with status {status}: {message:.{_SAID_CHARS}}")
