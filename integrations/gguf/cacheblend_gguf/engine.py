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

import torch
from transformers import AutoTokenizer

from cacheblend_gguf.decoding import Answering, Decoding, processors
from cacheblend_gguf.encoding import LlamaEncoder
from cacheblend_gguf.llama import HEAD_CELLS, Llama, LlamaOptions
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.conversation import Resumption
from cacheblend_rag.engine import BlendStream, ChunkLibrary, GenerationResult, StopStrings
from cacheblend_rag.engine.background import in_thread
from cacheblend_rag.engine.engine import open_engine_store
from cacheblend_rag.engine.generation import PieceStreamer
from cacheblend_rag.engine.many import options_of_each
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.engine.scheduler import Patience
from cacheblend_rag.errors import CacheBlendError, ChunkReadError, ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.fuse.plan import Plan
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import ModelCard
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import FixedSelection
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.tuning import Tuning

__all__ = ["GGUFEngine"]

logger = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 256
_AT_ONCE = 16
# What tokenizers differ in: blanks, letters beyond ASCII, digits, lines, pictures, control tokens.
_PROBES = ("The ferry leaves  at 12:05.\n\n\tNo. 3", "Ærø, žluť, 東京, \U0001f6a2", "<s></s><|im_start|>user\n", " a")


class GGUFEngine(ChunkLibrary):
    """An engine over a GGUF file: the methods of `Engine`, whose docstrings are in `BlendEngine`.

    Prompts are blended without recomputing: selectors, source attention and attachments are those of models in transformers.
    Of a conversation nothing is kept yet between two turns beside the chunks.

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
        _check_tokenizer(llama, tokenizer)
        self.blend = BlendConfig()
        self.blend = self.check_blend(BlendConfig.of(blend))
        opened = open_engine_store(store, config, self.tuning, None)
        self._owns_store = opened is not store
        identity = uuid.uuid4().hex if opened.is_private else llama.digest()
        shapes = tuple((1, keys.width, values.width) for keys, values in llama.form.layers)
        card = ModelCard(identity, llama.window, llama.form.layers[0][0].dtype, shapes, (None,) * len(shapes))
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
        n_ctx: int | None = None,
        n_threads: int | None = None,
        n_gpu_layers: int = -1,
        n_seq_max: int = 16,
        kv_type: str = "f16",
    ) -> GGUFEngine:
        """Load a GGUF file and make an engine with it.

        Parameters
        ----------
        model : str or Path
            The file.
        config, blend, store, tenant, tuning
            As for `BlendEngine`.
        n_ctx : int, optional
            Maximum tokens of a prompt and its answer; by default 8192, or as many as the model was trained on.
        n_threads : int, optional
            Threads that compute; by default as many as llama.cpp chooses.
        n_gpu_layers : int
            Layers on the GPU, where llama.cpp was built for one; all by default.
        n_seq_max : int
            Maximum answers that are decoded together.
        kv_type : str
            What KV is kept in: "f16", "f32", "bf16", "q8_0" or "q4_0".

        Raises
        ------
        ConfigError
            If there is no such file, llama.cpp cannot load it, or an option has no meaning.
        UnsupportedModelError
            If its KV cannot be moved or taken apart, or its tokenizer is not known.
        """
        path = Path(model).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; give a GGUF file")
        llama = Llama(path.resolve(), LlamaOptions(n_ctx, n_threads, n_gpu_layers, n_seq_max, kv_type))
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            engine = cls(llama, tokenizer, config=config, blend=blend, store=store, tenant=tenant, tuning=tuning)
        except BaseException:
            llama.close()
            raise
        engine.model_name, engine._owns_llama = str(model), True
        return engine

    def for_tenant(self, tenant: str) -> GGUFEngine:
        """Return an engine of another tenant over this one's model, store and settings; close it before this one."""
        engine = GGUFEngine(
            self.llama,
            self.tokenizer,
            config=self.config,
            blend=self.blend,
            store=self._store,
            tenant=tenant,
            tuning=self.tuning,
            decoding=self._decoding,
        )
        engine.model_name = self.model_name
        return engine

    def close(self, *, wait: bool = True) -> None:
        super().close(wait=wait)
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

    def check_blend(self, blend: BlendConfig) -> BlendConfig:
        """Return the settings that a call uses; `ConfigError` if they would have tokens recomputed."""
        blend = BlendConfig.of(blend).over(self.blend)
        if blend.enabled and blend.recompute_ratio:
            raise ConfigError(
                f"recompute_ratio={blend.recompute_ratio} recomputes tokens, which llama.cpp cannot do; leave it at 0, or use "
                "the model with transformers"
            )
        return blend

    def conversation(self, max_bytes: int | None = None) -> _Conversation:
        """Begin a conversation; what its turns have computed is not kept."""
        return _Conversation()

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

    def _begin(self, prompt: BlendPrompt, max_new_tokens: int | None, options: dict[str, Any]) -> Request:
        """Return the request for a prompt, checked, in tokens and under the settings in force, but not computed."""
        self._check_open()
        started = time.perf_counter()
        given = {name: value for name, value in options.items() if value is not None}
        blend = given.pop("blend", None)
        given.pop("conversation", None)
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
        return Request(prompt, assembled, settings, started, patience, max_new_tokens=max_new_tokens, options=given)

    def _is_blended(self, request: Request) -> bool:
        return request.blend.enabled and bool(request.prompt.chunks)

    def _answer(self, request: Request) -> GenerationResult:
        options = request.options
        strings = options.get("stop_strings")
        stops = [StopStrings(self.tokenizer, strings)] if strings else []
        criteria = [*stops, *options.get("stopping_criteria", ())]
        ends = {*(_ids(options["eos_token_id"]) if "eos_token_id" in options else self.end_ids)}
        ends |= {id for each in criteria if isinstance(each, StopStrings) for id in each.ids}
        while True:
            readers = self._readers(request)
            layout = request.prompt.layout
            limit = min(request.max_new_tokens or _DEFAULT_NEW_TOKENS, self.llama.window - len(layout))
            answering = Answering(request, readers, limit, frozenset(ends), processors(options), criteria)
            try:
                self._decoding.answer(answering)
                break
            except ChunkReadError as error:
                # What cannot be read is a miss: the next round encodes the chunk anew.
                self._supply.note_unreadable(request, error)
        output, times = tuple(answering.output), answering.times
        request.output_ids = output
        report = make_report(request, len(self.llama.form.layers), output, times)
        self._observe(report)
        text = lexer_of(self.tokenizer).text(output, skip_special_tokens=True)
        reason = "stop" if output[-1] in ends else "length"
        return GenerationResult(text, output, request.prompt.layout.token_ids, report, reason)

    def _readers(self, request: Request) -> dict[int, KVReader]:
        """Return readers of a prompt's stored rows, by their first; misses are encoded first."""
        request.resumed = None
        if not self._is_blended(request):
            refusal = "the prompt has no chunks" if request.blend.enabled else None
            request.plan = Plan(None, "full", fallback_reason=refusal)
            self._supply.note_held(request, [chunk.key for chunk in request.prompt.chunks])
            return {}
        found = self._supply.open_all(request)
        missing = [key for key, reader in found.items() if reader is None]
        if missing and self._supply.limit_misses(request, missing):
            return self._readers(request)
        rows = torch.empty(0, dtype=torch.int64)
        request.plan, request.recomputed = Plan(FixedSelection(rows), "none", 0.0), rows
        readers = self._supply.readers(request, found)
        head = request.prompt.head
        if head is not None and head.rows <= HEAD_CELLS:
            request.resumed = Resumption(replace(request.prompt.layout, resumed_rows=head.rows), head.rows)
            readers[0] = self._supply.head(request, head)
        return readers

    def _observe(self, report: BlendReport) -> None:
        self.metrics.observe(report)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", report, extra={"blend": report.to_dict()})

    def _check_model(self) -> None:
        # A file that llama.cpp has loaded does not change.
        pass


class _Conversation:
    """A conversation of which nothing is kept: each turn is a prompt like any other."""

    def reset(self) -> None:
        return None


def _raised(number: int, error: Exception) -> None:
    raise error


def _ids(given: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _check_tokenizer(llama: Llama, tokenizer: Any) -> None:
    """Raise `UnsupportedModelError` if a tokenizer makes other ids of texts than llama.cpp."""
    for text in _PROBES:
        ours, theirs = tokenizer(text, add_special_tokens=False)["input_ids"], llama.tokenize(text)
        if ours != theirs:
            raise UnsupportedModelError(
                f"transformers reads the tokenizer of {llama.path.name} differently from llama.cpp: of {text!r} it makes "
                f"{ours[:12]}, llama.cpp {theirs[:12]}; use another GGUF file of the model, or its folder in transformers"
            )
