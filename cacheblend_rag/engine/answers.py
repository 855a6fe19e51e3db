"""Answering prompts: from a call to its request, and what is counted of the answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt, id_list
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.background import in_thread
from cacheblend_rag.engine.decode import checked_options, last_logits
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PieceStreamer, PrefillResult
from cacheblend_rag.engine.library import ChunkLibrary
from cacheblend_rag.engine.many import Many, options_of_each
from cacheblend_rag.engine.request import Request, RequestState, make_report
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.scheduler import GaveWayError, Patience, aside
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.fuse.plan import check_selector
from cacheblend_rag.model import Decoder, num_decoder_layers
from cacheblend_rag.prefixes import PrefixCache
from cacheblend_rag.report import BlendReport
from cacheblend_rag.tuning import Tuning

__all__ = ["AnsweringLibrary"]

logger = logging.getLogger(__name__)


class AnsweringLibrary(ChunkLibrary):
    """A library whose prompts a model in this process answers; `BlendEngine` puts it together."""

    model: PreTrainedModel
    decoder: Decoder | None
    blend: BlendConfig
    tuning: Tuning
    _prefixes: PrefixCache
    _runner: Runner
    _many: Many

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """What is attached."""
        return tuple(self._runner.attachments)

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses: the engine's own, except those that the call sets.

        Raises
        ------
        ConfigError
            If they name a selector or a layer that does not exist, or ask for something that the model does not have.
        """
        blend = BlendConfig.of(blend).over(self.blend)
        # A model whose configuration names no layers is never blended.
        if self.decoder is not None or num_decoder_layers(self.model):
            check_selector(blend, num_decoder_layers(self.model), self.decoder)
        return blend

    def prefill(
        self,
        prompt: BlendPrompt,
        *,
        blend: BlendConfig | None = None,
        logits_to_keep: int | None = None,
    ) -> PrefillResult:
        """Prefill a prompt, blending its chunks; return logits, token ids and report. Nothing is taken over of earlier prompts.

        Parameters
        ----------
        prompt, blend
            As for `generate`.
        logits_to_keep : int, optional
            Return the logits after each of that many last tokens, which must be text; by default those after the last one.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        ConfigError
            If the settings do not fit the model.
        """
        request = self._begin(prompt, blend, shares=False)
        count, layout = 1 if logits_to_keep is None else logits_to_keep, request.prompt.layout
        text = len(layout.token_ids) - max((chunk.stop for chunk in layout.chunks), default=0)
        if not 1 <= count <= text:
            raise PromptError(
                f"logits_to_keep={count} must be from 1 to {text}, the tokens after the prompt's last chunk"
            )
        logits = self._last_logits(request, count)
        report = make_report(request, self._num_layers)
        self._observe(report)
        return PrefillResult(logits[0] if logits_to_keep is None else logits, request.prompt.layout.token_ids, report)

    def generate(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt; return text, token ids and report.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.
        max_new_tokens : int, optional
            Maximum tokens to generate, never beyond the model's window; by default the model's own setting, or 256.
        blend : BlendConfig, optional
            Blending settings for this call; those it does not set are the engine's.
        wait_s : float, optional
            Maximum seconds to wait for the model while other calls have it; by default as long as it takes.
        **generation_kwargs : Any
            Options of transformers' ``generate``, which does the decoding: sampling, stop strings, processors and so on.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        AnswerTimeoutError
            If the model was not free within `wait_s`.
        ConfigError
            If an option cannot be combined with blending.
        """
        options, patience = self._checked_options(max_new_tokens, generation_kwargs), Patience.of(wait_s)
        request = self._begin(prompt, blend, patience, max_new_tokens=max_new_tokens, options=options)
        return self._finish(request, self._many.answer(request))

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        stop: threading.Event | None = None,
        on_failed: Callable[[int, Exception], None] | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts, which is faster than one after the other; return the answers in their order.

        Chunks without stored KV are encoded in one go, each once whichever prompts have it; the prompts are prefilled one
        after the other, and their answers are decoded together in a padded batch. Greedy answers are those of `generate`,
        except for rounding: if two tokens are equally likely to the last digits, either may be chosen. Sampled answers are
        different draws. Where settings or options do not allow a batch (`Repair`, `SnapKV`, options that read a prompt's
        ids), answers are decoded one by one, and each report's `alone_reason` says why. The times in the reports count from
        this call on.

        Stopping criteria and logits processors see each prompt as a batch of one without padding. Every prompt gets shallow
        copies of those given, unless ``stopping_criteria`` and ``logits_processor`` hold a list for each prompt.

        Parameters
        ----------
        prompts : sequence of BlendPrompt
            The prompts. All of them are checked before the first is computed.
        batch_size : int, optional
            Maximum prompts that are decoded together; by default as many as memory is meant to allow.
        stop : threading.Event, optional
            Ends all answers at the next token once it is set.
        on_failed : callable, optional
            Called with the number of each prompt that cannot be answered, and why, instead of the error being raised; the others
            are answered.
        max_new_tokens, blend, wait_s, **generation_kwargs
            As for `generate`, which also says what is raised.
        """
        started = time.perf_counter()
        options, patience = self._checked_options(max_new_tokens, generation_kwargs), Patience.of(wait_s)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1; leave it out to choose it automatically")
        if not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts is a single {type(prompts).__name__}; give a list of them, or use generate")
        stop = stop or threading.Event()
        numbers: dict[Request, int] = {}
        begin = partial(self._begin, blend=blend, patience=patience, started=started, max_new_tokens=max_new_tokens)
        for number, (prompt, own) in enumerate(zip(prompts, options_of_each(options, len(prompts)), strict=True)):
            try:
                numbers[replace(begin(prompt, options=own), stop=stop)] = number
            except CacheBlendError as error:
                if on_failed is None:
                    raise
                on_failed(number, error)
        results: dict[int, GenerationResult] = {}
        for request, result in self._many.answer_all(list(numbers), batch_size, stop):
            if not isinstance(result, Exception):
                results[numbers[request]] = self._finish(request, result)
            elif on_failed is None:
                raise result
            else:
                on_failed(numbers[request], result)
        return [results[number] for number in sorted(results)]

    async def agenerate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]:
        """Answer many prompts as `generate_many` does, in a separate thread; if cancelled, that ends at the next token."""
        return await in_thread(partial(self.generate_many, prompts, max_new_tokens, **options))

    def stream(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> BlendStream:
        """Answer a prompt piece by piece; takes and raises what `generate` does, prompt errors at once.

        Returns
        -------
        BlendStream
            An iterator over pieces of text; its `result` holds the report.
        """
        options, patience = self._checked_options(max_new_tokens, generation_kwargs), Patience.of(wait_s)
        request = self._begin(prompt, blend, patience, max_new_tokens=max_new_tokens, options=options)

        def work(show: Callable[[str], None], stop: threading.Event) -> GenerationResult:
            streamed = replace(request, streamer=PieceStreamer(self.tokenizer, show), stop=stop)
            return self._finish(streamed, self._many.answer(streamed))

        return BlendStream(work)

    def delete(self, ids: Iterable[str]) -> int:
        ids = id_list(ids)
        known = super().delete(ids)
        # What has seen them goes with them.
        self._prefixes.refresh(set(ids))
        return known

    def close(self, *, wait: bool = True) -> None:
        for each in self.attachments:
            each.close()
        super().close(wait=wait)
        self._prefixes.close()

    @property
    def _num_layers(self) -> int:
        return num_decoder_layers(self.model)

    def _checked_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call that say something; `ConfigError` if it cannot have them."""
        return checked_options(self.model, max_new_tokens, options)

    def _last_logits(self, request: Request, count: int) -> torch.Tensor:
        """Prefill a prompt; return the last ``(count, vocab)`` logits, on the CPU."""
        with self._runner.prefill(request, 0, count) as read:
            logits = read.logits
            if logits is None:
                logits = last_logits(self.model, read.inputs, read.cache, count)
            return logits.cpu()

    def _finish(self, request: Request, result: GenerationResult) -> GenerationResult:
        self._observe(result.report)
        # An answer that was cut short would differ for that reason alone.
        if not request.stop.is_set():
            for each in self.attachments:
                each.answered(request, result)
        return result

    def generate_aside(
        self, prompt: BlendPrompt, blend: BlendConfig, max_new_tokens: int | None = None, **generation_kwargs: Any
    ) -> GenerationResult | None:
        """Answer a prompt when no other call needs the model, uncounted, unlogged and without telling attachments of the answer.

        None where it was left between two layers, because another call came or the engine was closed.
        """
        if self.decoder is None:
            raise UnsupportedModelError(f"{self.unsupported_reason}; use generate, which other calls do not interrupt")
        options = self._checked_options(max_new_tokens, generation_kwargs)
        request = self._begin(prompt, blend, max_new_tokens=max_new_tokens, options=options, shares=False)
        # The interpreter waits for the thread that asks when it ends, and has no use for what it finds out then.
        with (
            suppress(GaveWayError),
            aside(
                self._runner.scheduler,
                self.decoder,
                lambda: self._supply.is_closed or not threading.main_thread().is_alive(),
            ),
        ):
            return self._many.answer(request)
        return None

    def _observe(self, report: BlendReport) -> None:
        """Count and log what was answered."""
        self.metrics.observe(report)
        if logger.isEnabledFor(logging.INFO):
            # Formatters that write fields, as JSON for example, find the figures under "blend".
            logger.info("%s", report, extra={"blend": report.to_dict()})

    def _begin(
        self,
        prompt: BlendPrompt,
        blend: BlendConfig | None,
        patience: Patience | None = None,
        started: float | None = None,
        max_new_tokens: int | None = None,
        options: dict[str, Any] | None = None,
        shares: bool = True,
    ) -> Request:
        """Return the request for a prompt, checked, in tokens and under the settings in force, but not computed."""
        self._check_open()
        began = time.perf_counter()
        started = began if started is None else started
        self._check_model()
        blend = self.blend if blend is None or blend is self.blend else self.check_blend(blend)
        assembled = self._assembler.assemble(prompt)
        if blend.enabled:
            self._prefetcher.claim(chunk.key for chunk in assembled.chunks)
        return Request(
            prompt,
            assembled,
            blend,
            started,
            Patience() if patience is None else patience,
            shares,
            max_new_tokens,
            options or {},
            # While the others of a batch were put into tokens, it waited.
            state=RequestState(queue_s=began - started),
        )
