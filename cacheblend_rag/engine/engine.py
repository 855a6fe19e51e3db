"""The engine: the single entry point to encoding, blending and decoding."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.conversation import Conversation, KeptTurns, Turn
from cacheblend_rag.encode import Encoder
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.background import in_thread
from cacheblend_rag.engine.decode import checked_options, end_ids, last_logits
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PieceStreamer, PrefillResult
from cacheblend_rag.engine.library import ChunkLibrary
from cacheblend_rag.engine.many import Many, options_of_each
from cacheblend_rag.engine.opening import engine_identity, look_at_model, open_engine_store
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.scheduler import GaveWayError, Patience, aside, scheduler_of
from cacheblend_rag.errors import ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.fuse.plan import check_selector
from cacheblend_rag.model import Capability, ModelCard, WeightsWatch, capability, model_window, num_decoder_layers
from cacheblend_rag.model.checkpoint import load_pretrained
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVStore
from cacheblend_rag.tuning import Tuning

__all__ = ["BlendEngine"]

logger = logging.getLogger(__name__)
_Attached = TypeVar("_Attached", bound=Attachment)


class BlendEngine(ChunkLibrary):
    """Answers prompts made of stored chunks with an open-weight model in this process.

    Any number of threads may call it, and any number of engines may share a model, which one computation at a time has. Calls of
    `generate` and `stream` that find it busy are decoded together, as `generate_many` does, if settings and options allow it.

    Parameters
    ----------
    model : PreTrainedModel
        A Hugging Face causal language model.
    tokenizer : Any
        Its tokenizer.
    config : EngineConfig, optional
        The engine's settings; by default those of the environment.
    blend : BlendConfig, optional
        How prompts are blended unless a call says otherwise; by default the environment's settings.
    store : KVStore, str, Path or None
        Where KV is kept: a folder, a store that you opened (`open_store`), or None for this process's RAM.
    tenant : str, optional
        Who owns the KV; a shorthand for the setting of that name, over which it takes precedence.
    tuning : Tuning, optional
        Constants to change for comparisons.

    Attributes
    ----------
    model_name : str
        What `from_pretrained` was given, or else the model's own name.
    metrics : EngineMetrics
        What the engine has done, for Prometheus.
    store : TenantStore
        What this engine's tenant has in the store.
    namespace : str
        Digest of the model, tokenizer, preamble and tenant (`config.tenant`): engines with the same one share KV.
    window : int or None
        Maximum tokens that the model can read and write; None if its configuration does not say.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    unsupported_reason : str or None
        Why it cannot.

    Raises
    ------
    ConfigError
        If the settings name a selector or a check layer that does not exist.
    UnsupportedModelError
        If the model cannot be blended and ``config.strict`` is set.
    StoreFormatError
        If the folder is no store, or one of another version.
    StoreReadOnlyError
        If a store cannot be made there. A store that cannot be opened for another reason (damage, a full disk, a lock) is no
        error: KV is then kept in this process's RAM, which a warning says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        config = EngineConfig.of(config)
        config = self.config = config if tenant is None else config.replace(tenant=tenant)
        self.blend = BlendConfig.of(blend)
        self.tuning = tuning or Tuning()
        self.model = model.eval()
        self.model_name: str = getattr(model, "name_or_path", "") or type(model).__name__
        self.window = model_window(model)
        self.decoder, self.unsupported_reason = look_at_model(
            self.model, strict=self.config.strict, self_check=self.tuning.self_check
        )
        self.check_blend(self.blend)
        self._store = open_engine_store(store, self.config, self.tuning, self.decoder)
        self._owns_store = self._store is not store
        with ExitStack() as undo:
            if self._owns_store:
                # Nobody could close it if the rest fails.
                undo.callback(self._store.close)
            self._weights = WeightsWatch(self.model)
            self._identity = engine_identity(model, tokenizer, private=self._store.is_private)
            super().__init__(
                tokenizer,
                self._identity,
                self.decoder,
                self.window,
                self._store,
                config,
                self.tuning,
                self._encoder,
                num_decoder_layers(model) if self.decoder is None else self.decoder.num_kv_layers,
                scheduler_of(model),
            )
            self._kept = KeptTurns(self._answering, self.namespace, config.conversation_bytes)
            self._runner = Runner(
                model,
                self.decoder,
                self.unsupported_reason,
                self._answering,
                self._supply,
                config,
                self.tuning,
            )
            self._many = Many(model, tokenizer, self.decoder, self._runner, self.tuning)
            undo.pop_all()

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
            A Hugging Face id, a folder, or "reference" for the small model that comes with a clone of the project.
        config : EngineConfig, optional
            The settings; `dtype` and `device` say how the model is loaded.
        blend, store, tenant, tuning
            As for an engine.
        **model_kwargs : Any
            Passed to ``AutoModelForCausalLM.from_pretrained``; what locates the model (`revision`, `token` and so on)
            is also passed to the tokenizer's.

        Returns
        -------
        BlendEngine
            The engine.

        Raises
        ------
        ConfigError
            If there is no such model, it cannot be reached, its device does not exist, or the settings are invalid.
        """
        config, blend = EngineConfig.of(config), BlendConfig.of(blend)
        # Known before a large model is loaded for nothing.
        make_selector(blend.selector)
        loaded, tokenizer = load_pretrained(model, config, model_kwargs)
        engine = cls(loaded, tokenizer, config=config, blend=blend, store=store, tenant=tenant, tuning=tuning)
        engine.model_name = str(model)
        return engine

    def for_tenant(self, tenant: str) -> BlendEngine:
        """Return an engine of another tenant over this one's model, store and settings; close it before this one.

        What is attached to this one is attached to it too, as far as attachments say what that is.
        """
        engine = BlendEngine(
            self.model,
            self.tokenizer,
            config=self.config,
            blend=self.blend,
            store=self._store,
            tenant=tenant,
            tuning=self.tuning,
        )
        engine.model_name = self.model_name
        for each in self.attachments:
            if (other := each.for_tenant()) is not None:
                engine.attach(other)
        return engine

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """What is attached."""
        return tuple(self._runner.attachments)

    def attach(self, attachment: _Attached) -> _Attached:
        """Attach something optional, of `cacheblend_attachments` or of yours, to all requests that come from then on.

        Returns
        -------
        Attachment
            What was given; its ``close``, or the engine's, detaches it.

        Raises
        ------
        ConfigError
            If it is no attachment, was attached before, does not go with the model or with what is attached, or the engine is
            closed.
        """
        self._check_open()
        if not isinstance(attachment, Attachment):
            raise ConfigError(f"{attachment!r:.40} is no Attachment; give one, as Guard() of cacheblend_attachments")
        if attachment.leave is not None:
            raise ConfigError(f"this {type(attachment).__name__} was attached before; make another one")
        attachment.attached(self)
        attachment.leave = partial(self._runner.attachments.remove, attachment)
        self._runner.attachments.append(attachment)
        return attachment

    def close(self, *, wait: bool = True) -> None:
        for each in self.attachments:
            each.close()
        super().close(wait=wait)
        self._kept.close()

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses: the engine's own, except those that the call sets.

        Raises
        ------
        ConfigError
            If they name a selector or a layer that does not exist, or ask for something that the model does not have.
        """
        blend = BlendConfig.of(blend)
        blend = self.blend.replace(**{name: getattr(blend, name) for name in blend.model_fields_set})
        # A model whose configuration names no layers is never blended.
        if self.decoder is not None or num_decoder_layers(self.model):
            check_selector(blend, num_decoder_layers(self.model), self.decoder)
        return blend

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: the one it is known by here, or that of its configuration."""
        return model in (self.model_name, getattr(self.model, "name_or_path", ""))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the model's own settings say."""
        return end_ids(self.model)

    def delete(self, ids: Iterable[str], *, sources: Iterable[str] = ()) -> int:
        known = super().delete(ids, sources=sources)
        # Conversations forget what may know of them.
        self._kept.refresh()
        return known

    def capability(self) -> Capability:
        """Return what each layer of the model is like, and what blending does there, or why it does nothing."""
        return capability(self.model, self.decoder, self.unsupported_reason)

    def conversation(self, max_bytes: int | None = None) -> Conversation:
        """Begin a conversation, whose turns reuse what earlier turns have computed.

        Parameters
        ----------
        max_bytes : int, optional
            Maximum bytes of KV that it keeps, in the memory in which the model computes; by default it is limited only by
            ``config.conversation_bytes``, which all conversations of this engine share.

        Returns
        -------
        Conversation
            Pass it to `generate`, `stream` or `prefill` with each turn; its docstring says what is reused, and how exactly.

        Raises
        ------
        ConfigError
            If `max_bytes` is negative.
        """
        self._check_open()
        limit = self.config.conversation_bytes if max_bytes is None else max_bytes
        if limit < 0:
            raise ConfigError(f"max_bytes={limit} is negative; give a number of bytes, 0 to keep nothing")
        return Conversation(self._kept, limit)

    def card(self) -> ModelCard:
        """Return what a server of the same weights must know to take KV from this engine's store.

        Raises
        ------
        UnsupportedModelError
            If the model's KV cannot be moved.
        """
        if self.decoder is None or not self.decoder.is_movable:
            raise UnsupportedModelError(
                self.unsupported_reason or f"KV of {type(self.model).__name__} cannot be moved to another position"
            )
        with self._runner.scheduler:
            return ModelCard.of(self.decoder, self._identity, self.window)

    def prefill(
        self,
        prompt: BlendPrompt,
        *,
        blend: BlendConfig | None = None,
        conversation: Conversation | None = None,
        logits_to_keep: int | None = None,
    ) -> PrefillResult:
        """Prefill a prompt, blending its chunks.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.
        blend : BlendConfig, optional
            Blending settings for this call; those it does not set are the engine's.
        conversation : Conversation, optional
            The conversation that this is a turn of.
        logits_to_keep : int, optional
            Return the logits behind each of the last so many tokens, which must be text; by default those behind the last one.

        Returns
        -------
        PrefillResult
            Logits, token ids and report.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        ConfigError
            If the settings do not fit the model.
        """
        request = self._begin(prompt, blend, conversation)
        count, layout = 1 if logits_to_keep is None else logits_to_keep, request.prompt.layout
        text = len(layout.token_ids) - max((chunk.stop for chunk in layout.chunks), default=0)
        if not 1 <= count <= text:
            raise PromptError(
                f"logits_to_keep={count} must be from 1 to {text}, the tokens behind the prompt's last chunk"
            )
        logits = self._runner.run(request, 0, lambda cache, inputs: last_logits(self.model, inputs, cache, count).cpu())
        report = make_report(request, num_decoder_layers(self.model), time.perf_counter())
        self._observe(report)
        return PrefillResult(logits[0] if logits_to_keep is None else logits, request.prompt.layout.token_ids, report)

    def generate(
        self,
        prompt: BlendPrompt,
        max_new_tokens: int | None = None,
        *,
        blend: BlendConfig | None = None,
        conversation: Conversation | None = None,
        wait_s: float | None = None,
        **generation_kwargs: Any,
    ) -> GenerationResult:
        """Answer a prompt.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.
        max_new_tokens : int, optional
            Maximum tokens to generate, never beyond the model's window; by default the model's own setting, or 256.
        blend : BlendConfig, optional
            Blending settings for this call; those it does not set are the engine's.
        conversation : Conversation, optional
            The conversation that this is a turn of (`conversation`).
        wait_s : float, optional
            Maximum seconds to wait for the model while other calls have it; by default as long as it takes.
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
        options = checked_options(self.model, max_new_tokens, generation_kwargs)
        patience = Patience.of(wait_s)
        request = self._begin(prompt, blend, conversation, patience, max_new_tokens=max_new_tokens, options=options)
        return self._answer(request)

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        blend: BlendConfig | None = None,
        wait_s: float | None = None,
        stop: threading.Event | None = None,
        **generation_kwargs: Any,
    ) -> list[GenerationResult]:
        """Answer many prompts, which is faster than one after the other.

        Chunks without stored KV are encoded in one go, each once whichever prompts have it; the prompts are prefilled one after
        the other, and their answers are decoded together in a padded batch. Greedy answers are those of `generate`, except for
        rounding: if two tokens are equally likely to the last digits, either may be chosen. Sampled answers are different
        draws. Where settings or options do not allow a batch (`Repair`, `SnapKV`, options that read a prompt's ids),
        answers are decoded one by one, and each report's `alone_reason` says why.

        Stopping criteria and logits processors see each prompt as a batch of one without padding. Every prompt gets shallow
        copies of those given, unless ``stopping_criteria`` and ``logits_processor`` hold a list for each prompt.

        Parameters
        ----------
        prompts : sequence of BlendPrompt
            The prompts. All of them are checked before the first is computed.
        max_new_tokens : int, optional
            Maximum tokens of each answer, as in `generate`.
        batch_size : int, optional
            Maximum prompts that are decoded together; by default as many as memory is meant to allow.
        blend : BlendConfig, optional
            Blending settings for this call; those it does not set are the engine's.
        wait_s : float, optional
            Maximum seconds to wait for the model while other calls have it; by default as long as it takes.
        stop : threading.Event, optional
            Ends all answers at the next token once it is set.
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
        started = time.perf_counter()
        options, patience = checked_options(self.model, max_new_tokens, generation_kwargs), Patience.of(wait_s)
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be at least 1; leave it out to have it chosen")
        if not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts is a single {type(prompts).__name__}; give a list of them, or use generate")
        stop = stop or threading.Event()
        requests = [
            self._begin(prompt, blend, patience=patience, started=started, max_new_tokens=max_new_tokens, options=own)
            for prompt, own in zip(prompts, options_of_each(options, len(prompts)), strict=True)
        ]
        for request in requests:
            request.stop = stop
        results: dict[int, GenerationResult] = {}
        for index, result in self._many.answer_all(requests, batch_size, stop):
            results[index] = result
            self._finish(requests[index], result)
        return [results[index] for index in sorted(results)]

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
        options = checked_options(self.model, max_new_tokens, generation_kwargs)
        patience = Patience.of(wait_s)
        request = self._begin(prompt, blend, conversation, patience, max_new_tokens=max_new_tokens, options=options)

        def work(show: Callable[[str], None], stop: threading.Event) -> GenerationResult:
            request.streamer, request.stop = PieceStreamer(self.tokenizer, show), stop
            return self._answer(request)

        return BlendStream(work)

    def _answer(self, request: Request) -> GenerationResult:
        result = self._many.answer(request)
        self._finish(request, result)
        return result

    def _finish(self, request: Request, result: GenerationResult) -> None:
        self._observe(result.report)
        # An answer that was cut short would differ for that reason alone.
        if not request.stop.is_set():
            for each in self.attachments:
                each.answered(request, result)

    def generate_aside(
        self, prompt: BlendPrompt, blend: BlendConfig, max_new_tokens: int | None = None, **generation_kwargs: Any
    ) -> GenerationResult | None:
        """Answer a prompt when no other call needs the model, uncounted, unlogged and without telling attachments of the answer.

        Returns
        -------
        GenerationResult or None
            None where it was left between two layers, because another call came or the engine was closed.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended, so that its layers are not known.
        PromptError, ConfigError
            As `generate` does.
        """
        if self.decoder is None:
            raise UnsupportedModelError(f"{self.unsupported_reason}; ask it by generate, which does not give way")
        options = checked_options(self.model, max_new_tokens, generation_kwargs)
        request = self._begin(prompt, blend, max_new_tokens=max_new_tokens, options=options)
        # The interpreter waits for the thread that asks when it ends; nobody waits for what it finds out then.
        with (
            suppress(GaveWayError),
            aside(
                self._runner.scheduler,
                self.decoder,
                lambda: self._supply.is_closed or not threading.main_thread().is_alive(),
            ),
        ):
            return self._many.alone(request)
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
        conversation: Conversation | None = None,
        patience: Patience | None = None,
        started: float | None = None,
        max_new_tokens: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> Request:
        """Return the request for a prompt, checked, in tokens and under the settings in force, but not computed."""
        self._check_open()
        began = time.perf_counter()
        started = began if started is None else started
        if conversation is not None and not conversation.belongs_to(self._kept):
            raise ConfigError(
                "the conversation belongs to another engine, whose KV is of no use here; make one by this engine's conversation()"
            )
        # Before all that takes time: what is reset from now on forgets this turn too.
        turn = None if conversation is None else Turn(conversation)
        self._weights.check()
        order, sets_ratio = None, False
        if blend is not None and blend is not self.blend:
            blend, sets_ratio = self.check_blend(blend), "recompute_ratio" in blend.model_fields_set
        else:
            order = next(filter(None, (each.order() for each in reversed(self.attachments))), None)
            blend = self.blend if order is None else order.blend
        assembled = self._assembler.assemble(prompt)
        if order is not None and assembled.layout.remembers:
            # What an attachment falls back to knows less than these chunks.
            blend = self.blend
        if blend.enabled:
            self._prefetcher.claim(chunk.key for chunk in assembled.chunks)
        return Request(
            prompt,
            assembled,
            blend,
            started,
            Patience() if patience is None else patience,
            turn,
            order,
            sets_ratio,
            max_new_tokens,
            options or {},
            # While the others of a batch were put into tokens, it waited.
            queue_s=began - started,
        )

    def _encoder(self, preamble: tuple[int, ...]) -> Encoder | None:
        return None if self.decoder is None else Encoder(self.decoder, preamble, self.tuning.encode_batch_tokens)

    def _check_model(self) -> None:
        self._weights.check()
