"""vLLM's engine in this process, which has its model in others: asked from any thread, and from any event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import anyio
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from cacheblend_rag.errors import AnswerTimeoutError, BackendError, PromptError
from vllm_cacheblend.asking import spool_params

__all__ = ["TimeLimit", "VLLMEngine"]

Result = TypeVar("Result")

# Users' requests have priority 0; vLLM takes the lowest first.
_LATER = 10
_POLL_S = 0.5
_STOP_S = 30.0


class TimeLimit:
    """The seconds that an answer may take, from now on, in all that is waited for."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until = anyio.current_time() + timeout_s

    async def wait(self, awaited: Awaitable[Result]) -> Result:
        """Return what is awaited; `AnswerTimeoutError` if it is not there in time."""
        with anyio.CancelScope(deadline=self._until):
            return await awaited
        raise AnswerTimeoutError(
            f"the answer was not finished after {self._timeout_s:g} s; give it more time, or request fewer tokens"
        )


class VLLMEngine:
    """A running vLLM, on an event loop of its own; a context manager.

    If it ends by itself, this process gets SIGTERM, and leaving the context raises `BackendError`.
    """

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self._arguments = arguments
        self._loop = asyncio.new_event_loop()
        self._is_over = threading.Event()

    def __enter__(self) -> VLLMEngine:
        threading.Thread(target=self._loop.run_forever, name="cacheblend-vllm", daemon=True).start()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(self._arguments)

        try:
            self._llm = self._begun(start()).result()
        except Exception as error:
            raise BackendError(f"vLLM does not start ({error}); what it printed above says why") from error
        threading.Thread(target=self._watch, name="cacheblend-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        has_ended = self._llm.errored
        self._is_over.set()
        self._llm.shutdown(timeout=_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if has_ended and not isinstance(error, Exception):
            raise BackendError("vLLM ended by itself; what it printed above says why")

    @property
    def window(self) -> int:
        """Most tokens of a prompt and its answer."""
        return int(self._llm.model_config.max_model_len)

    def own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's own settings of generation, and what of them are vLLM's parameters of sampling."""
        config = self._llm.model_config
        return dict(config.try_get_generation_config()), dict(config.get_diff_sampling_param())

    def is_up(self) -> bool:
        """Return whether it answers."""
        return not self._llm.errored

    def warm(self, prompts: Sequence[tuple[str, tuple[int, ...]]], salt: str, is_awaited: bool) -> None:
        """Have prompts computed whose KV is then in the spool; see `vllm_cacheblend.library.Warm`."""

        async def ask(name: str, ids: tuple[int, ...]) -> None:
            options = {"temperature": 0, "max_tokens": 1, "extra_args": {"kv_transfer_params": spool_params(name)}}
            prompt = {"prompt_token_ids": list(ids), "cache_salt": salt}
            async for _ in self._outputs(prompt, options, 0 if is_awaited else _LATER):
                pass

        async def ask_all() -> list[BaseException | None]:
            # All are waited for, so that none writes later.
            return await asyncio.gather(*(ask(*prompt) for prompt in prompts), return_exceptions=True)

        for error in filter(None, self._begun(ask_all()).result()):
            raise error

    async def stream(
        self, prompt: dict[str, Any], options: dict[str, Any], limit: TimeLimit
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs, in the time that the answer has left; who leaves the generator ends the answer.

        `options` are those of vLLM's `SamplingParams`.
        """
        outputs = self._outputs(prompt, options | {"output_kind": RequestOutputKind.DELTA}, 0)

        async def following() -> Any:
            return await anext(outputs, None)

        async def end() -> None:
            await outputs.aclose()

        try:
            while (output := await limit.wait(asyncio.wrap_future(self._begun(following())))) is not None:
                yield output
        finally:
            self._begun(end())

    async def _outputs(
        self, prompt: dict[str, Any], options: dict[str, Any], priority: int
    ) -> AsyncGenerator[Any, None]:
        try:
            params = SamplingParams(**options)
            async with aclosing(self._llm.generate(prompt, params, uuid.uuid4().hex, priority=priority)) as outputs:
                async for output in outputs:
                    yield output
        except (VLLMClientError, ValueError) as error:
            raise PromptError(f"vLLM refuses this: {error}") from error
        except VLLMError as error:
            raise BackendError(f"vLLM cannot answer ({type(error).__name__}: {error}); its log says why") from error

    def _begun(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_S):
            if self._llm.errored:
                os.kill(os.getpid(), signal.SIGTERM)
                return
