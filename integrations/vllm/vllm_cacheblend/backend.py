"""vLLM as backend of the server: a prompt goes to it in tokens, with where the stored KV is that it begins with."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
from vllm.sampling_params import StructuredOutputsParams

from cacheblend_rag.chat.answer import Answer, Ending
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import ChunkLibrary, GenerationResult
from cacheblend_rag.engine.decode import token_ids
from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.stops import StopCutter
from cacheblend_serve.backend import Asked, Backend
from vllm_cacheblend.asking import tokens_prompt, transfer_params
from vllm_cacheblend.engine import TimeLimit, VLLMEngine
from vllm_cacheblend.library import VLLMLibrary
from vllm_cacheblend.prefix import StoredPrefix, stored_prefix

__all__ = ["VLLMBackend", "check_ratio"]

# What vLLM is told as it is asked.
_GIVEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


class VLLMBackend(Backend):
    """Answers with vLLM, which batches all requests; who made the library, the first tenant's, and the engine closes them."""

    def __init__(self, model_name: str, library: VLLMLibrary, engine: VLLMEngine) -> None:
        super().__init__(model_name, library)
        self._engine = engine
        self._own, self._drawn = engine.own()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's own settings say."""
        return token_ids(self._own.get("eos_token_id"))

    @property
    def blend(self) -> BlendConfig:
        """Blending as vLLM does it: it recomputes nothing."""
        return BlendConfig(recompute_ratio=0)

    def is_ready(self) -> bool:
        """Return whether vLLM answers."""
        return self._engine.is_up()

    async def answer(self, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[str | Answer, None]:
        check_ratio(asked.recompute_ratio or 0)
        seen, limit = _Seen(time.perf_counter()), TimeLimit(asked.timeout_s)
        # A late request is told so at once, though what the thread encodes is encoded to its end.
        opening = anyio.to_thread.run_sync(stored_prefix, library, asked.prompt, abandon_on_cancel=True)
        prefix = await limit.wait(opening)
        seen.opened = time.perf_counter()
        # vLLM ends an answer without thoughts at its stop strings itself.
        cutter = StopCutter(asked.stop if asked.thinking else (), asked.thinking)
        async with aclosing(self._engine.stream(tokens_prompt(prefix), self._options(asked, prefix), limit)) as outputs:
            async for output in outputs:
                written = seen.take(output)
                shown = list(cutter.feed(written))
                for piece in filter(None, [written]) if asked.is_raw else shown:
                    yield piece
                if cutter.is_done and asked.thinking is not None:
                    seen.output_tokens = len(asked.thinking.read(seen.text))
                    break
        for piece in () if asked.is_raw else cutter.feed("", is_last=True):
            yield piece
        report = seen.report(prefix)
        library.metrics.observe(report)
        ending = Ending() if asked.is_raw or asked.thinking is None else Ending(asked.stop, None, asked.thinking)
        yield ending.read(GenerationResult(seen.text, (), prefix.token_ids, report, seen.reason))

    def _options(self, asked: Asked, prefix: StoredPrefix) -> dict[str, Any]:
        """Return the answer's parameters of sampling."""
        own = self._drawn
        most = min(asked.max_tokens or own.get("max_tokens") or asked.limit_tokens, asked.limit_tokens)
        options = own | {name: value for name in _GIVEN if (value := getattr(asked, name)) is not None}
        if asked.temperature is None and not self._own.get("do_sample"):
            # vLLM draws unless it is told not to.
            options["temperature"] = 0
        return options | {
            "extra_args": {"kv_transfer_params": transfer_params(prefix)},
            "max_tokens": max(1, min(most, self._engine.window - len(prefix.token_ids))),
            # Thoughts may hold them, and special tokens may be around thoughts.
            "stop": list(asked.stop) if asked.thinking is None else [],
            "skip_special_tokens": asked.thinking is None,
            "ignore_eos": asked.ignore_eos,
            "structured_outputs": None if asked.grammar is None else StructuredOutputsParams(grammar=asked.grammar),
        }


def check_ratio(ratio: float) -> None:
    """Refuse to recompute."""
    if ratio:
        raise ConfigError(
            f"recompute_ratio={ratio} is not possible with vLLM, which goes on after stored KV and recomputes nothing in it; "
            "leave it out, or serve with --backend engine"
        )


@dataclass
class _Seen:
    """Times and counts seen of an answer."""

    began: float
    opened: float = 0.0
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    reason: str = "stop"
    output_tokens: int = 0
    cached_tokens: int = 0

    def take(self, output: Any) -> str:
        """Take in one of vLLM's outputs, and return the piece of text that it brings."""
        [choice] = output.outputs
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.cached_tokens = output.num_cached_tokens or 0
        self.output_tokens += len(choice.token_ids)
        if choice.finish_reason not in (None, "stop", "length"):
            raise BackendError(f"vLLM cut the answer off (finish_reason={choice.finish_reason!r}); its log says why")
        self.reason = choice.finish_reason or self.reason
        self.text += choice.text
        return str(choice.text)

    def report(self, prefix: StoredPrefix) -> BlendReport:
        """Return what the answer cost."""
        chunks = []
        place = prefix.num_stored - sum(chunk.tokens for chunk in prefix.chunks if chunk.hit)
        for chunk in prefix.chunks:
            place += chunk.tokens
            # The last token is computed in any case.
            if chunk.hit and place > self.cached_tokens + 1:
                chunk = replace(chunk, hit=False, reason="vLLM computed it; its log says why")
            chunks.append(chunk)
        context = sum(chunk.tokens for chunk in chunks)
        computed = sum(chunk.tokens for chunk in chunks if not chunk.hit)
        hits = sum(chunk.hit for chunk in chunks)
        rest = self.output_tokens - 1
        return BlendReport(
            ttft_s=self.first - self.began,
            load_s=0.0,
            encode_s=0.0,
            recompute_s=0.0,
            prompt_tokens=len(prefix.token_ids),
            context_tokens=context,
            recomputed_tokens=computed,
            recompute_ratio=0.0,
            charged_ratio=computed / context if context else 0.0,
            hits=hits,
            misses=len(chunks) - hits,
            selector="none",
            fallback_reason=None if hits or not chunks else prefix.ends,
            chunks=tuple(chunks),
            output_tokens=self.output_tokens,
            tpot_s=(self.last - self.first) / rest if rest > 0 else None,
            overhead_s=self.opened - self.began,
        )
