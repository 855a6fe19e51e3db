"""The engine: chunks in a store, and a model that answers prompts made of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt, id_list
from cacheblend_rag.config import BlendConfig, EngineConfig, Tuning
from cacheblend_rag.engine.backend import Attachment, Backend, deadline_of, end_workers, engine_class
from cacheblend_rag.engine.batch import options_of_each
from cacheblend_rag.engine.huggingface import TransformersBackend
from cacheblend_rag.engine.library import ChunkLibrary, open_engine_store
from cacheblend_rag.engine.protocol import BlendStream, GenerationResult, PrefillResult, in_thread
from cacheblend_rag.engine.request import Request, RequestState, make_report
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.model.checkpoint import load_pretrained
from cacheblend_rag.prefixes import PrefixCache
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVStore

__all__ = ["BlendEngine"]

logger = logging.getLogger(__name__)
_Attached = TypeVar("_Attached", bound=Attachment)


class BlendEngine(ChunkLibrary):
    """Answers prompts made of stored chunks with an open-weight model in this process.

    Any number of threads may call it, and any number of engines may share a model, which one computation at a time has.
    Calls of `generate` and `stream` that find it busy are decoded together, as `generate_many` does, if settings and
    options allow it.

    Parameters
    ----------
    model : PreTrainedModel or Backend
        A Hugging Face causal language model; or what another package's engine puts in its place.
    tokenizer : Any
        Its tokenizer; a backend brings its own.
    config : EngineConfig, optional
        The engine's settings; by default those of the environment.
    blend : BlendConfig, optional
        How prompts are blended unless a call says otherwise; by default the environment's settings.
    store : KVStore, str, Path or None
        Where KV is kept: a folder, a store that you opened (`open_store`), or None for this process's RAM.
    tenant : str, optional
        Who owns the KV; a shorthand for the setting of that name, over which it takes precedence.
    tuning : optional
        Constants that tests and benchmarks change.

    Attributes
    ----------
    model_name : str
        What `from_pretrained` was given, or else the model's own name.
    window : int or None
        Maximum tokens that the model can read and write; None if its configuration does not say.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended, as `unsupported_reason` says.

    Raises
    ------
    ConfigError
        If the settings name a selector or a check layer that does not exist.
    UnsupportedModelError
        If the model cannot be blended and ``config.strict`` is set.
    StoreFormatError, StoreReadOnlyError
        If the folder is no store, is one of another version, or is not writable. Where a store cannot be opened for
        another reason (damage, a full disk, a lock), a warning says so, and RAM takes its place.
    """

    _kind = TransformersBackend

    def __init__(
        self,
        model: PreTrainedModel | Backend,
        tokenizer: Any = None,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        config = EngineConfig.of(config)
        config = config if tenant is None else config.replace(tenant=tenant)
        self.tuning = tuning or Tuning()
        if isinstance(model, Backend):
            backend = model
        else:
            backend = self._kind(model, tokenizer, self.tuning, strict=config.strict)
        self.backend, self.model, self.model_name = backend, backend.model, backend.name
        self.decoder = backend.form if isinstance(backend.form, Decoder) else None
        self.unsupported_reason = backend.reason
        self.blend = BlendConfig.of(blend)
        self.check_blend(self.blend)
        opened = open_engine_store(store, config, self.tuning, backend.form)
        self._owns_store = opened is not store
        try:
            super().__init__(backend, opened, config, self.tuning)
        except BaseException:
            if self._owns_store:
                # It could not be closed any more.
                opened.close()
            raise
        self._prefixes = self._supply.prefixes = PrefixCache(
            self._answering, self.namespace, config.prefix_bytes, backend.shelf, backend.cut
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
        **model_kwargs: Any,
    ) -> BlendEngine:
        """Load a model and its tokenizer and make an engine with them.

        Parameters
        ----------
        model : str or Path
            A Hugging Face id, a folder, or a GGUF file.
            With the extra `gguf`, llama.cpp answers from a GGUF file (``repo/name:file.gguf`` is one of the Hub), and what
            this returns is a `GGUFEngine`, which takes options of llama.cpp; with the extra `hybrid`, a model with recurrent
            layers gets a `HybridEngine`.
        config : EngineConfig, optional
            The settings; `dtype` and `device` say how the model is loaded.
        blend, store, tenant, tuning
            As for an engine.
        **model_kwargs : Any
            Passed to ``AutoModelForCausalLM.from_pretrained``; what locates the model (`revision`, `token` and so on) also to the
            tokenizer's.

        Raises
        ------
        ConfigError
            If there is no such model, it cannot be reached, its device does not exist, or the settings are invalid.
        """
        config, blend = EngineConfig.of(config), BlendConfig.of(blend)
        # Known before a large model is loaded for nothing.
        make_selector(blend.selector)
        given: dict[str, Any] = {"config": config, "blend": blend, "store": store, "tenant": tenant, "tuning": tuning}
        if (kind := engine_class(model)) is not None:
            opened: BlendEngine = kind.from_pretrained(model, **given, **model_kwargs)
            return opened
        loaded, tokenizer = load_pretrained(model, config, model_kwargs)
        engine: BlendEngine = (engine_class(loaded) or cls)(loaded, tokenizer, **given)
        engine.model_name = str(model)
        return engine

    def for_tenant(self, tenant: str) -> BlendEngine:
        """Return an engine of another tenant over this one's model, store, settings and attachments; close it before this one."""
        engine = self.another(
            config=self.config, blend=self.blend, store=self._store, tuning=self.tuning, tenant=tenant
        )
        for each in self.attachments:
            if (other := each.for_tenant()) is not None:
                engine.attach(other)
        return engine

    def another(self, **settings: Any) -> BlendEngine:
        """Return an engine with settings of its own over this one's model, as it was inspected; close it before this one."""
        engine = type(self)(self.backend, **settings)
        engine.model_name = self.model_name
        return engine

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """What is attached."""
        return tuple(self._supply.attachments)

    def attach(self, attachment: _Attached) -> _Attached:
        """Attach something optional, of `cacheblend_attachments` or of yours, to all requests that come from then on; return it.

        Its ``close``, or the engine's, detaches it. `ConfigError` if it does not go with the model or with what is attached.
        """
        self._check_open()
        if not isinstance(attachment, Attachment):
            raise ConfigError(f"{attachment!r:.40} is not an Attachment; give one, for example SnapKV(0.25)")
        if self.model is None:
            raise ConfigError(
                f"{type(attachment).__name__} needs a model in transformers, and {self.model_name} is none; leave it out, or "
                "load the model's folder instead"
            )
        if attachment.leave is not None:
            raise ConfigError(f"this {type(attachment).__name__} was attached before; make another one")
        attachment.attached(self)
        attachment.leave = partial(self._supply.attachments.remove, attachment)
        self._supply.attachments.append(attachment)
        return attachment

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: the one it is known by here, or that of its configuration."""
        return model in (self.model_name, getattr(self.model, "name_or_path", ""))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's own settings say."""
        return self.backend.end_ids

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses: the engine's own, except those that it sets; `ConfigError` if they do not fit."""
        blend = BlendConfig.of(blend).over(self.blend)
        self.backend.check_blend(blend)
        return blend

    def prefill(
        self, prompt: BlendPrompt, *, blend: BlendConfig | None = None, logits_to_keep: int | None = None
    ) -> PrefillResult:
        """Prefill a prompt, blending its chunks; return logits, token ids and report. Nothing is taken over of earlier prompts.

        Parameters
        ----------
        prompt, blend
            As for `generate`, which also says what is raised.
        logits_to_keep : int, optional
            Return the logits after each of that many last tokens, which must be text; by default those after the last one.
        """
        request = self.begin_request(prompt, blend, shares=False)
        count, layout = 1 if logits_to_keep is None else logits_to_keep, request.prompt.layout
        text = len(layout.token_ids) - max((chunk.stop for chunk in layout.chunks), default=0)
        if not 1 <= count <= text:
            raise PromptError(
                f"logits_to_keep={count} must be from 1 to {text}, the tokens after the prompt's last chunk"
            )
        logits = self.backend.last_logits(request, count)
        report = make_report(request, self.backend.num_layers)
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
            Options of transformers' ``generate``, which does the decoding: sampling, stop strings, processors and so on; and
            ``seed``, a whole number with which sampling draws the same again.

        Raises
        ------
        PromptError, ConfigError
            If the prompt cannot be served, or an option cannot be combined with blending.
        AnswerTimeoutError
            If the model was not free within `wait_s`.
        """
        return self._answered(self.begin_request(prompt, blend, max_new_tokens, generation_kwargs, wait_s=wait_s))

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

        Prompts are prefilled one after the other, and their answers decoded together in padded batches. Greedy answers are those
        of `generate`, except for rounding; sampled ones are different draws. Where settings or options do not allow a batch
        (`Repair`, `SnapKV`, options that read a prompt's ids), answers are decoded one by one, and each report's `alone_reason`
        says why. The times in the reports count from this call on.

        Stopping criteria and logits processors see each prompt as a batch of one without padding: shallow copies of those given,
        unless ``stopping_criteria`` and ``logits_processor`` hold a list for each prompt.

        Parameters
        ----------
        prompts : sequence of BlendPrompt
            The prompts. All of them are checked before the first is computed.
        batch_size : int, optional
            Maximum prompts that are decoded together; by default as many as memory is meant to allow.
        stop : threading.Event, optional
            Ends all answers at the next token once it is set.
        on_failed : callable, optional
            Called with the number of each prompt that cannot be answered, and why, instead of the error being raised.
        max_new_tokens, blend, wait_s, **generation_kwargs
            As for `generate`, which also says what is raised.
        """
        started = time.perf_counter()
        self.backend.check_options(max_new_tokens, generation_kwargs)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1; leave it out to choose it automatically")
        if not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts is a single {type(prompts).__name__}; give a list of them, or use generate")
        stop = stop or threading.Event()
        numbers: dict[Request, int] = {}
        each = options_of_each(generation_kwargs, len(prompts))
        for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                request = self.begin_request(prompt, blend, max_new_tokens, own, wait_s=wait_s, started=started)
                numbers[replace(request, stop=stop)] = number
            except CacheBlendError as error:
                if on_failed is None:
                    raise
                on_failed(number, error)
        results: dict[int, GenerationResult] = {}
        for request, result in self.backend.answer(list(numbers), batch_size):
            # When all are stopped, what has not begun is left out.
            if isinstance(result, GenerationResult) and (result.token_ids or not stop.is_set()):
                results[numbers[request]] = self._finish(request, result)
            elif isinstance(result, Exception) and not stop.is_set():
                if on_failed is None:
                    raise result
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
        """Answer a prompt piece by piece; takes and raises what `generate` does, prompt errors at once."""
        request = self.begin_request(prompt, blend, max_new_tokens, generation_kwargs, wait_s=wait_s)

        def work(show: Callable[[str], None], stop: threading.Event) -> GenerationResult:
            return self._answered(replace(request, show=show, stop=stop))

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

    def card(self) -> ModelCard:
        """Return what a server of the same weights must know to take KV from this engine's store.

        `UnsupportedModelError` if the model's KV cannot be moved.
        """
        if self.decoder is None or not self.decoder.is_movable:
            why = f"the KV of {self.model_name} is in a form of its own, or cannot be moved"
            raise UnsupportedModelError(self.unsupported_reason or f"{why}, so no other server takes it")
        with self.backend.scheduler:
            return ModelCard.of(self.decoder, self._identity, self.window)

    def begin_request(
        self,
        prompt: BlendPrompt,
        blend: BlendConfig | None = None,
        max_new_tokens: int | None = None,
        options: dict[str, Any] | None = None,
        *,
        wait_s: float | None = None,
        started: float | None = None,
        shares: bool = True,
    ) -> Request:
        """Return the request for a prompt, checked, in tokens and under the settings in force, but not computed."""
        self._check_open()
        # Those that have embedded the question: another thread may be the one that answers.
        end_workers()
        began = time.perf_counter()
        started = began if started is None else started
        options, deadline = self.backend.check_options(max_new_tokens, options or {}), deadline_of(wait_s)
        self._check_model()
        blend = self.blend if blend is None or blend is self.blend else self.check_blend(blend)
        assembled = self._assembler.assemble(prompt)
        if blend.enabled:
            self._prefetcher.claim(chunk.key for chunk in assembled.chunks)
        # While the others of a batch were put into tokens, it waited.
        state = RequestState(queue_s=began - started)
        return Request(
            self._supply, prompt, assembled, blend, started, deadline, shares, max_new_tokens, options, state=state
        )

    def _answered(self, request: Request) -> GenerationResult:
        """Have a prompt answered, with others that wait; return the answer or raise why there is none."""
        [(_, result)] = self.backend.answer([request])
        if isinstance(result, Exception):
            raise result
        return self._finish(request, result)

    def _finish(self, request: Request, result: GenerationResult) -> GenerationResult:
        self._observe(result.report)
        # An answer that was cut short would differ for that reason alone.
        if not request.stop.is_set():
            for each in self.attachments:
                each.answered(request, result)
        return result

    def _observe(self, report: BlendReport) -> None:
        """Count and log what was answered."""
        self.metrics.observe(report)
        if logger.isEnabledFor(logging.INFO):
            # Formatters that write fields, as JSON for example, find the figures under "blend".
            logger.info("%s", report, extra={"blend": report.to_dict()})
