"""The engine of a GGUF model: chunks as every engine has them, answers by llama.cpp."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cacheblend_gguf.decoding import Answering, Decoding, processors
from cacheblend_gguf.encoding import LlamaEncoder
from cacheblend_gguf.files import find_file
from cacheblend_gguf.llama import HEAD_CELLS, Llama, LlamaOptions
from cacheblend_gguf.tokenizer import check_tokenizer, read_tokenizer
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendStream, ChunkLibrary, GenerationResult, StopStrings
from cacheblend_rag.engine.background import in_thread
from cacheblend_rag.engine.decode import token_ids
from cacheblend_rag.engine.engine import open_engine_store
from cacheblend_rag.engine.generation import PieceStreamer, PrefillResult
from cacheblend_rag.engine.many import options_of_each
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.engine.scheduler import Patience
from cacheblend_rag.errors import CacheBlendError, ChunkReadError, ConfigError, PromptError
from cacheblend_rag.fuse.plan import Plan, make_plan
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import ModelCard
from cacheblend_rag.prefixes import PrefixCache, ReusedPrefix
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.base import part_of
from cacheblend_rag.tuning import Tuning

__all__ = ["GGUFEngine"]

logger = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 256
_AT_ONCE = 16


class GGUFEngine(ChunkLibrary):
    """An engine over a GGUF file: the methods of `Engine`, whose docstrings are in `BlendEngine`.

    What is recomputed are the first tokens of chunks (the selector "boundary"): other selectors, attachments and all else that
    looks into a model are for models in transformers.

    Parameters
    ----------
    llama : Llama
        The model.
    tokenizer : Any
        Its tokenizer, of transformers.
    config, blend, store, tenant, tuning
        As for `BlendEngine`.
    decoding : Decoding, optional
        What decodes the answers of all engines over the model.

    Raises
    ------
    UnsupportedModelError
        If the tokenizer makes other tokens of a text than llama.cpp does.
    """

    def __init__(
        self,
        llama: Llama,
        tokenizer: Any,
        *,
        config: EngineConfig | None = None,
        blend: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        tenant: str | None = None,
        tuning: Tuning | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        config = EngineConfig.of(config)
        config = config if tenant is None else config.replace(tenant=tenant)
        self.tuning = tuning or Tuning()
        self.model_name = str(llama.path)
        self.llama = llama
        check_tokenizer(llama.vocabulary, tokenizer)
        self.blend = BlendConfig()
        self.blend = self.check_blend(BlendConfig.of(blend))
        opened = open_engine_store(store, config, self.tuning, None)
        self._owns_store = opened is not store
        identity = uuid.uuid4().hex if opened.is_private else llama.digest()
        rows = [row for layer in llama.form.layers for row in layer]
        dtypes = {row.dtype for row in rows}
        # Its sizes are all that is asked of a decoder elsewhere; where types differ, in bytes.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        widths = [row.nbytes // dtype.itemsize for row in rows]
        shapes = tuple((1, keys, values) for keys, values in zip(widths[::2], widths[1::2], strict=True))
        self.decoder = card = ModelCard(identity, llama.window, dtype, shapes, (None,) * len(shapes))
        super().__init__(
            tokenizer,
            identity,
            card,
            llama.window,
            opened,
            config,
            self.tuning,
            lambda preamble: LlamaEncoder(card, preamble, self.tuning.encode_batch_tokens, llama),
            len(shapes),
            llama.scheduler,
            llama.vocab_size,
        )
        self._assembler.window_hint = llama.window_hint
        self._prefixes = PrefixCache(self._answering, self.namespace, config.prefix_bytes, llama.kept, llama.cut)
        self._decoding = Decoding(llama) if decoding is None else decoding
        self._owns_llama = False

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
        **options: Any,
    ) -> GGUFEngine:
        """Load a GGUF file and make an engine with it.

        Parameters
        ----------
        model : str or Path
            The file, the first of several, a folder with one, or ``repo/name:file.gguf`` of the Hugging Face Hub.
        config, blend, store, tenant, tuning
            As for `BlendEngine`.
        **options : Any
            Those of `LlamaOptions`.

        Raises
        ------
        ConfigError
            If there is no such file, llama.cpp cannot load it, or an option has no meaning.
        UnsupportedModelError
            If its KV cannot be moved or taken apart, or its tokenizer is not known.
        """
        opened = LlamaOptions(**options)
        path = find_file(model)
        llama = Llama(path.absolute(), opened)
        try:
            engine = cls(
                llama,
                read_tokenizer(llama.vocabulary),
                config=config,
                blend=blend,
                store=store,
                tenant=tenant,
                tuning=tuning,
            )
        except BaseException:
            llama.close()
            raise
        engine.model_name, engine._owns_llama = str(model), True
        return engine

    def another(self, **settings: Any) -> GGUFEngine:
        """Return an engine with settings of its own over this one's model; close it before this one."""
        engine = GGUFEngine(self.llama, self.tokenizer, decoding=self._decoding, **settings)
        engine.model_name = self.model_name
        return engine

    def for_tenant(self, tenant: str) -> GGUFEngine:
        """Return an engine of another tenant over this one's model, store and settings; close it before this one."""
        own: dict[str, Any] = {"config": self.config, "blend": self.blend, "store": self._store, "tuning": self.tuning}
        return self.another(tenant=tenant, **own)

    def close(self, *, wait: bool = True) -> None:
        super().close(wait=wait)
        self._prefixes.close()
        if self._owns_llama:
            with self.llama.scheduler:
                self.llama.close()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the file says."""
        return self.llama.end_ids

    def is_called(self, model: str) -> bool:
        """Whether that is a name of the model: what `from_pretrained` was given, or the name of its file."""
        return model in (self.model_name, self.llama.path.name, self.llama.path.stem)

    def attach(self, attachment: Any) -> None:
        """Refuse what looks into a model of transformers."""
        raise ConfigError(
            f"{type(attachment).__name__} needs a model in transformers, and llama.cpp answers from {self.llama.path.name}; "
            "leave it out, or load the model's folder instead"
        )

    def capability(self) -> None:
        """Return nothing: of the layers llama.cpp says nothing."""

    def delete(self, ids: Iterable[str], *, sources: Iterable[str] = ()) -> int:
        known = super().delete(ids, sources=sources)
        # What has seen them goes with them.
        self._prefixes.refresh()
        return known

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses; `ConfigError` if they would have single tokens recomputed."""
        blend = BlendConfig.of(blend).over(self.blend)
        selector = make_selector(blend.selector).name
        chooses = blend.enabled and 0 < blend.recompute_ratio < 1 and selector not in ("none", "full")
        if chooses and not (selector == "boundary" and make_selector(blend.selector) == make_selector("boundary")):
            raise ConfigError(
                f"the selector {selector} chooses single tokens to recompute, and llama.cpp computes runs of them; give "
                'selector="boundary", which takes the first tokens of each chunk, or use the model with transformers'
            )
        return blend

    def prefill(
        self,
        prompt: BlendPrompt,
        *,
        blend: BlendConfig | None = None,
        logits_to_keep: int | None = None,
    ) -> PrefillResult:
        request = self._begin(prompt, None, {"blend": blend}, shares=False)
        count, layout = 1 if logits_to_keep is None else logits_to_keep, request.prompt.layout
        text = len(layout) - max((chunk.stop for chunk in layout.chunks), default=0)
        if not 1 <= count <= text:
            raise PromptError(
                f"logits_to_keep={count} must be from 1 to {text}, the tokens after the prompt's last chunk"
            )
        logits = torch.from_numpy(np.stack(self._compute(request, logits_to_keep=count).scores))
        report = make_report(request, len(self.llama.form.layers))
        self._observe(report)
        return PrefillResult(logits[0] if logits_to_keep is None else logits, layout.token_ids, report)

    def generate(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> GenerationResult:
        return self._answer(self._begin(prompt, max_new_tokens, options))

    def stream(self, prompt: BlendPrompt, max_new_tokens: int | None = None, **options: Any) -> BlendStream:
        request = self._begin(prompt, max_new_tokens, options)

        def work(show: Callable[[str], None], stop: threading.Event) -> GenerationResult:
            request.streamer, request.stop = PieceStreamer(self.tokenizer, show), stop
            request.streamer.next_tokens_are_prompt = False
            return self._answer(request)

        return BlendStream(work)

    def generate_many(
        self,
        prompts: Sequence[BlendPrompt],
        max_new_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        stop: threading.Event | None = None,
        on_failed: Callable[[int, Exception], None] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        if not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts is a single {type(prompts).__name__}; give a list of them, or use generate")
        requests: dict[int, Request] = {}
        failed = on_failed or _raised
        for number, (prompt, own) in enumerate(zip(prompts, options_of_each(options, len(prompts)), strict=True)):
            try:
                requests[number] = self._begin(prompt, max_new_tokens, own)
                requests[number].stop = stop or requests[number].stop
            except CacheBlendError as error:
                failed(number, error)
        self._supply.encode_misses([request for request in requests.values() if self._is_blended(request)])
        results: dict[int, GenerationResult] = {}
        with ThreadPoolExecutor(min(len(requests) or 1, batch_size or _AT_ONCE)) as pool:
            answers = {number: pool.submit(self._answer, request) for number, request in requests.items()}
            for number, answer in answers.items():
                try:
                    results[number] = answer.result()
                except Exception as error:  # handed to who asked
                    failed(number, error)
        return [results[number] for number in sorted(results)]

    async def agenerate_many(
        self, prompts: Sequence[BlendPrompt], max_new_tokens: int | None = None, **options: Any
    ) -> list[GenerationResult]:
        return await in_thread(partial(self.generate_many, prompts, max_new_tokens, **options))

    def _begin(
        self, prompt: BlendPrompt, max_new_tokens: int | None, options: dict[str, Any], shares: bool = True
    ) -> Request:
        """Return the request for a prompt, checked, in tokens and under the settings in force, but not computed."""
        self._check_open()
        started = time.perf_counter()
        given = {name: value for name, value in options.items() if value is not None}
        blend = given.pop("blend", None)
        patience = Patience.of(given.pop("wait_s", None))
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} leaves nothing to generate; give 1 or more")
        processors(given)
        if prompt.positions is not None:
            raise PromptError("llama.cpp places tokens one after the other; leave the prompt's positions out")
        assembled = self._assembler.assemble(prompt)
        settings = self.blend if blend is None else self.check_blend(blend)
        if settings.enabled:
            self._prefetcher.claim(chunk.key for chunk in assembled.chunks)
        return Request(
            prompt, assembled, settings, started, patience, shares, max_new_tokens=max_new_tokens, options=given
        )

    def _is_blended(self, request: Request) -> bool:
        blend, selector = request.blend, make_selector(request.blend.selector).name
        is_full = selector == "full" or (blend.recompute_ratio == 1 and selector != "none")
        return blend.enabled and not is_full and bool(request.prompt.chunks)

    def _answer(self, request: Request) -> GenerationResult:
        options = request.options
        strings = options.get("stop_strings")
        stops = [StopStrings(self.tokenizer, strings)] if strings else []
        criteria = [*stops, *options.get("stopping_criteria", ())]
        ends = {*(token_ids(options["eos_token_id"]) if "eos_token_id" in options else self.end_ids)}
        ends |= {id for each in criteria if isinstance(each, StopStrings) for id in each.ids}
        answering = self._compute(request, frozenset(ends), criteria)
        output = request.output_ids = tuple(answering.output)
        report = make_report(request, len(self.llama.form.layers), output, answering.times)
        self._observe(report)
        text = lexer_of(self.tokenizer).text(output, skip_special_tokens=True)
        reason = "stop" if output[-1] in ends else "length"
        return GenerationResult(text, output, request.prompt.layout.token_ids, report, reason)

    def _compute(
        self,
        request: Request,
        ends: frozenset[int] = frozenset(),
        criteria: Sequence[Any] = (),
        logits_to_keep: int = 0,
    ) -> Answering:
        """Have a prompt answered, or only read as far as that many last scores; return what came of it."""
        while True:
            try:
                readers = self._readers(request)
                whole = len(request.prompt.layout) * self.kv_bytes_per_token
                request.figures |= {"kv_bytes": whole, "kv_bytes_before": whole}
                limit = min(
                    request.max_new_tokens or _DEFAULT_NEW_TOKENS, self.llama.window - len(request.prompt.layout)
                )
                assert request.plan is not None
                answering = Answering(
                    request,
                    readers,
                    limit,
                    ends,
                    processors(request.options),
                    list(criteria),
                    self._prefixes,
                    None if request.recomputed is None else request.plan.ratio,
                    self.kv_bytes_per_token,
                    logits_to_keep,
                )
                self._decoding.answer(answering)
                return answering
            except ChunkReadError as error:
                # What cannot be read is a miss: the next round encodes the chunk anew.
                self._supply.note_unreadable(request, error)

    def _readers(self, request: Request) -> dict[int, KVReader]:
        """Return readers of the rows of a prompt that are stored or kept, by their first; misses are encoded first."""
        is_blended = self._is_blended(request)
        head = self._head(request, is_blended)
        if not is_blended:
            refusal = "the prompt has no chunks" if request.blend.enabled and not request.prompt.chunks else None
            request.plan, request.recomputed = Plan(None, "full", fallback_reason=refusal), None
            self._supply.note_held(request, [chunk.key for chunk in request.prompt.chunks])
            return head
        found = self._supply.open_all(request)
        num_layers, layout = len(self.llama.form.layers), request.prompt.layout
        request.plan = make_plan(request.blend, layout, num_layers)
        assert request.plan.selection is not None
        rows = request.recomputed = request.plan.selection.rows()
        request.charge = float(rows.numel() * num_layers)
        readers = self._supply.readers(request, found)
        for chunk in request.waiting:
            reader = readers.pop(chunk.start)
            self._check_place(chunk.key, reader, chunk.first)
            # Of its first tokens the stored rows are left out.
            count = int(((rows >= chunk.start) & (rows < chunk.stop)).sum())
            if count < len(chunk):
                readers[chunk.start + count] = part_of(reader, count, len(chunk)) if count else reader
        return {**readers, **head}

    def _check_place(self, key: str, reader: KVReader, first: int) -> None:
        """Raise `ChunkReadError` if KV was not computed behind the preamble and what its key says, as far as can be seen."""
        start, behind = reader.start - first, len(self._assembler.preamble)
        if start != behind if not reader.context else not behind < start < self.llama.window:
            raise ChunkReadError(key, f"it was computed at position {reader.start}, where it cannot have been")

    def _head(self, request: Request, is_blended: bool) -> dict[int, KVReader]:
        """Return a reader of the prompt's fixed head by its first row, where it has one and blending is on."""
        request.resumed, request.figures["head_tokens"] = None, 0
        head, layout = request.prompt.head, request.prompt.layout
        if not request.blend.enabled or head is None or head.rows > HEAD_CELLS:
            return {}
        own = layout if is_blended else replace(layout, chunks=())
        request.resumed = ReusedPrefix(replace(own, resumed_rows=head.rows), head.rows)
        return {0: self._supply.head(request, head)}

    def _observe(self, report: BlendReport) -> None:
        self.metrics.observe(report)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", report, extra={"blend": report.to_dict()})

    def _check_model(self) -> None:
        # A file that llama.cpp has loaded does not change.
        pass


def _raised(number: int, error: Exception) -> None:
    raise error
