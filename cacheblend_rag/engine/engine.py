"""The engine: the one door to encoding, blending and decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.decode import check_options, decode
from cacheblend_rag.engine.feed import Feed
from cacheblend_rag.engine.firsttoken import FirstLogits
from cacheblend_rag.engine.generation import BlendStream, GenerationResult
from cacheblend_rag.engine.many import Many, options_of
from cacheblend_rag.engine.prefill import PrefillEngine
from cacheblend_rag.engine.pretrained import load_pretrained
from cacheblend_rag.engine.run import PromptRun
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.pml.prompt import Prompt
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVStore

__all__ = ["BlendEngine"]


class BlendEngine(PrefillEngine):
    """Answers prompts made of stored chunks with an open-weight model in this process.

    Any number of threads may call it, and engines be made on one model; computations queue for the model, one at a time.

    Parameters
    ----------
    model : PreTrainedModel
        A Hugging Face causal language model.
    tokenizer : Any
        Its tokenizer.
    config : BlendConfig, optional
        The settings; by default those of the environment.
    store : KVStore, str, Path or None
        Where KV is kept: a folder, a store of yours, or None for this process's RAM.
    namespace : str, optional
        The tenant whose KV this is; short for the setting of that name, and wins over it.

    Attributes
    ----------
    model_name : str
        What `from_pretrained` was given, or else how the model calls itself.
    metrics : EngineMetrics
        What the engine has done, for Prometheus.
    schemas : Schemas
        The schemas that are loaded, and how their prompts are laid out.
    guard : Guard
        Compares some answers with full prefill in the background, if ``config.guard_rate`` is above 0.

    Raises
    ------
    ConfigError
        If the settings name a selector or a check layer that does not exist.
    UnsupportedModelError
        If the model cannot be blended and ``config.strict`` is set.
    StoreError
        If the folder cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        config: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__(model, tokenizer, config=config, store=store, namespace=namespace)
        self._many = Many(model, tokenizer, self.decoder, self._runner, self.config.self_check)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        config: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        namespace: str | None = None,
        **model_kwargs: Any,
    ) -> BlendEngine:
        """Load a model and its tokenizer and make an engine of them.

        Parameters
        ----------
        model : str or Path
            A Hugging Face id, a folder, or "reference" for the small model that comes with this package.
        config : BlendConfig, optional
            The settings; `dtype` and `device` say how the model is loaded.
        store : KVStore, str, Path or None
            Where KV is kept: a folder, a store of yours, or None for this process's RAM.
        namespace : str, optional
            The tenant whose KV this is; short for the setting of that name, and wins over it.
        **model_kwargs : Any
            Passed to ``AutoModelForCausalLM.from_pretrained``; what says where the model is (`revision`, `token` and so on)
            also to the tokenizer's.

        Returns
        -------
        BlendEngine
            The engine.

        Raises
        ------
        ConfigError
            If there is no such model, it cannot be reached or its device is not there, or the settings have no meaning.
        """
        config = BlendConfig.of(config)
        # Known before a large model is loaded for nothing.
        make_selector(config)
        loaded, tokenizer = load_pretrained(model, config, model_kwargs)
        engine = cls(loaded, tokenizer, config=config, store=store, namespace=namespace)
        engine.model_name = str(model)
        return engine

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def generate(
        self,
        prompt: BlendPrompt | Prompt,
        max_new_tokens: int | None = None,
        *,
        config: BlendConfig | None = None,
        conversation: Conversation | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt.

        Parameters
        ----------
        prompt : BlendPrompt or Prompt
            The prompt.
        max_new_tokens : int, optional
            Most tokens to generate, never beyond the model's window; by default the model's own setting, or 256.
        config : BlendConfig, optional
            Blending settings for this call.
        conversation : Conversation, optional
            The conversation that this is a turn of (`conversation`).
        wait_s : float, optional
            Most seconds to wait for the model while other calls have it; by default as long as it takes.
        **generation_kwargs : Any
            Options of transformers' ``generate``, which does the decoding: sampling, stop strings, processors and so
            on.

        Returns
        -------
        GenerationResult
            Text, token ids and report.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        AnswerTimeoutError
            If the model was not free within `wait_s`.
        ConfigError
            If an option cannot be combined with blending.
        """
        check_options(max_new_tokens, generation_kwargs)
        run = self._begin(prompt, config, conversation)
        run.wait_until = _until(run.started, wait_s)
        return self._decode(run, max_new_tokens, generation_kwargs, threading.Event(), None, self.guard.watch(run))

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt | Prompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        config: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts, which is faster than one after the other.

        Chunks without stored KV are encoded in one go, each once whichever prompts have it; the prompts are prefilled one after
        the other, and their answers are decoded together in a padded batch. Greedy answers are those of `generate`, but for
        rounding: where two tokens are as likely as each other to the last digits, either may be taken. Sampled answers are other
        draws. Where settings or options do not allow a batch (`repair_ratio`, `kv_capacity`, options that read a prompt's ids),
        answers are decoded one by one, and each report's `alone_reason` says why.

        Stopping criteria and logits processors see each prompt as a batch of one without padding. Every prompt gets shallow
        copies of those given, unless ``stopping_criteria`` and ``logits_processor`` hold a list for each prompt.

        Parameters
        ----------
        prompts : sequence of (BlendPrompt or Prompt)
            The prompts. All of them are checked before the first is computed.
        max_new_tokens : int, optional
            Most tokens of each answer, as in `generate`.
        batch_size : int, optional
            Most prompts that are decoded together; by default as many as `config.decode_batch_tokens` allows.
        config : BlendConfig, optional
            Blending settings for this call.
        wait_s : float, optional
            Most seconds to wait for the model while other calls have it; by default as long as it takes.
        **generation_kwargs : Any
            Options of transformers' ``generate``.

        Returns
        -------
        list of GenerationResult
            The answers, in the order of the prompts. The times in their reports count from this call on.

        Raises
        ------
        PromptError
            If a prompt cannot be served.
        AnswerTimeoutError
            If the model was not free within `wait_s`.
        ConfigError
            If an option cannot be combined with blending, or `batch_size` is below 1.
        """
        return self._generate_many(
            prompts, max_new_tokens, batch_size, config, wait_s, generation_kwargs, threading.Event()
        )

    async def agenerate_many(
        self,
        prompts: Sequence[BlendPrompt | Prompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        config: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts as `generate_many` does, in a thread of its own; if cancelled, that ends at the next token."""
        stop = threading.Event()
        answers: Feed[None, list[GenerationResult]] = Feed()
        answers.start(
            partial(self._generate_many, prompts, max_new_tokens, batch_size, config, wait_s, generation_kwargs, stop),
            "cacheblend-many",
        )
        try:
            return await answers.aoutcome()
        finally:
            stop.set()

    def _generate_many(
        self,
        prompts: Sequence[BlendPrompt | Prompt],
        max_new_tokens: int | None,
        batch_size: int | None,
        config: BlendConfig | None,
        wait_s: float | None,
        options: dict[str, Any],
        stop: threading.Event,
    ) -> list[GenerationResult]:
        started = time.perf_counter()
        check_options(max_new_tokens, options)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1; leave it out to have it chosen")
        if isinstance(prompts, BlendPrompt | Prompt):
            raise ConfigError(f"prompts is one {type(prompts).__name__}; give a list of them, or use generate")
        runs = [self._begin(prompt, config) for prompt in prompts]
        for run in runs:
            run.started = started
            run.wait_until = _until(started, wait_s)
        firsts = [self.guard.watch(run) for run in runs]
        results: dict[int, GenerationResult] = {}
        for index, result in self._many.answer(runs, max_new_tokens, batch_size, options, stop, firsts):
            results[index] = result
            self._observe(result.report)
            first = firsts[index]
            if first is not None and not stop.is_set():
                self.guard.offer(runs[index], result, first, max_new_tokens, options_of(options, index))
        return [results[index] for index in sorted(results)]

    def stream(
        self,
        prompt: BlendPrompt | Prompt,
        max_new_tokens: int | None = None,
        *,
        config: BlendConfig | None = None,
        conversation: Conversation | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> BlendStream:
        """Answer a prompt piece by piece; takes and raises what `generate` does, prompt errors at once.

        Returns
        -------
        BlendStream
            An iterator over pieces of text; its `result` holds the report.
        """
        check_options(max_new_tokens, generation_kwargs)
        run = self._begin(prompt, config, conversation)
        run.wait_until = _until(run.started, wait_s)
        first = self.guard.watch(run)

        def generate(streamer: Any, stop: threading.Event) -> GenerationResult:
            return self._decode(run, max_new_tokens, generation_kwargs, stop, streamer, first)

        return BlendStream(generate, self.tokenizer)

    def _decode(
        self,
        run: PromptRun,
        max_new_tokens: int | None,
        generation_kwargs: dict[str, Any],
        stop: threading.Event,
        streamer: Any,
        first: FirstLogits | None,
    ) -> GenerationResult:
        result = decode(
            self.model, self.tokenizer, self._runner, run, max_new_tokens, generation_kwargs, stop, streamer, first
        )
        self._observe(result.report)
        # An answer that was cut short would differ for that reason alone.
        if first is not None and not stop.is_set():
            self.guard.offer(run, result, first, max_new_tokens, generation_kwargs)
        return result


def _until(started: float, wait_s: float | None) -> float | None:
    if wait_s is None:
        return None
    if not isinstance(wait_s, int | float) or not wait_s >= 0:
        raise ConfigError(f"wait_s={wait_s!r} must be a number of seconds from 0 upwards; leave it out for no limit")
    return started + wait_s
