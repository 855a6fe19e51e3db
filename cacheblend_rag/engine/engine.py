"""The engine: the one door to encoding, blending and decoding."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, StoppingCriteriaList

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import Plan, make_plan
from cacheblend_rag.encode import encode_chunks
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PrefillResult, TokenWatch, refuse_foreign_options
from cacheblend_rag.engine.identity import engine_identity
from cacheblend_rag.engine.prompt import AssembledPrompt, Assembler, PromptChunk
from cacheblend_rag.engine.selfcheck import check_blending
from cacheblend_rag.errors import ChunkReadError, ConfigError, StoreError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, inspect_model, model_window
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.store import KVReader, KVStore, NodeRecord, open_store

__all__ = ["AddResult", "BlendEngine", "WarmEstimate"]

logger = logging.getLogger(__name__)

_REFERENCE = Path(__file__).parents[1] / "reference" / "weights"
_DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AddResult:
    """What `BlendEngine.add` did: chunks encoded, chunks that were there already, and tokens encoded."""

    encoded: int
    unchanged: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """What encoding some chunks would take: how many are not stored yet, their tokens, bytes of KV, and seconds."""

    chunks: int
    tokens: int
    kv_bytes: int
    seconds: float


class _InMemory:
    """Reads KV that was just encoded."""

    def __init__(self, kv: ChunkKV) -> None:
        self._kv = kv
        self.token_ids = kv.token_ids
        self.start = kv.start
        self.num_layers = len(kv.layers)

    def layer(self, index: int) -> LayerKV:
        return self._kv.layers[index]


@dataclass
class _Run:
    """Figures of one prefill while they are being found."""

    started: float
    hits: list[bool]
    plan: Plan
    encode_s: float = 0.0
    wait_s: float = 0.0
    forward_started: float = 0.0
    charge: float = 0.0
    recomputed: torch.Tensor | None = None


class BlendEngine:
    """Answers prompts made of stored chunks with an open-weight model in this process.

    Any number of threads may call it; computations queue for the model, one at a time.

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
    ) -> None:
        self.config = BlendConfig() if config is None else config
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._compute = threading.RLock()
        self._warned_of_no_hit = False
        self._closed = False
        self.unsupported_reason: str | None = None
        self.decoder = self._inspect()
        self._check_settings(self.config)
        self._owns_store = store is None or isinstance(store, str | Path)
        self.store: KVStore = (
            open_store(store, ram_bytes=self.config.ram_bytes, disk_bytes=self.config.disk_bytes)
            if store is None or isinstance(store, str | Path)
            else store
        )
        identity = engine_identity(model, tokenizer, private=self.store.is_private)
        self._assembler = Assembler(tokenizer, self.store, identity, self.config.encoding_prefix, model_window(model))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        config: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
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
        **model_kwargs : Any
            Passed to ``AutoModelForCausalLM.from_pretrained``.

        Returns
        -------
        BlendEngine
            The engine.
        """
        config = BlendConfig() if config is None else config
        name = str(_REFERENCE) if model == "reference" else str(model)
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = config.torch_dtype() or (torch.float32 if device == "cpu" else "auto")
        options = {"dtype": dtype} | model_kwargs
        loaded = AutoModelForCausalLM.from_pretrained(name, **options)
        if "device_map" not in model_kwargs:
            loaded = loaded.to(device)
        return cls(loaded, AutoTokenizer.from_pretrained(name), config=config, store=store)

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the store, unless it was handed in; calls under way end first."""
        with self._compute:
            if not self._closed:
                self._closed = True
                if self._owns_store:
                    self.store.close()

    def add(self, chunks: Iterable[Chunk], *, progress: Callable[[int, int], None] | None = None) -> AddResult:
        """Encode chunks and store their KV.

        The same id with the same text does nothing; with another text it replaces the chunk. All chunks are checked before the first is
        encoded, and every finished batch is kept even if the process dies in the next one.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks; of several with one id the last counts.
        progress : callable, optional
            Called with the number of finished chunks and of all, after each batch.

        Returns
        -------
        AddResult
            What was done.

        Raises
        ------
        EmptyChunkError
            If a chunk's text has no tokens.
        PromptTooLongError
            If a chunk does not fit the model's window.
        StoreError
            If the KV cannot be stored; what was stored until then stays.
        """
        self._check_open()
        wanted = list({(chunk.id if chunk.id is not None else object()): chunk for chunk in chunks}.values())
        todo = [record for record, held in self._compare(wanted) if not held]
        done = len(wanted) - len(todo)
        if progress is not None:
            progress(done, len(wanted))
        by_key: dict[str, list[NodeRecord]] = {}
        for record in todo:
            by_key.setdefault(record.key, []).append(record)
        if self.decoder is None:
            self.store.name(self._assembler.namespace, [record for record in todo if record.id])
            return AddResult(0, done, 0)
        tokens = 0
        first = [records[0] for records in by_key.values()]
        for batch in self._encode([record.token_ids for record in first]):
            names = []
            for index, kv in batch:
                self.store.put(first[index].key, kv)
                names += by_key[first[index].key]
                tokens += len(kv.token_ids)
            self.store.name(self._assembler.namespace, [record for record in names if record.id])
            done += len(names)
            if progress is not None:
                progress(done, len(wanted))
        return AddResult(len(todo), len(wanted) - len(todo), tokens)

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost, encoding nothing but one batch of random tokens to take the time.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks.

        Returns
        -------
        WarmEstimate
            What is not stored yet, in chunks, tokens, bytes of KV and seconds.
        """
        self._check_open()
        todo = {record.key: record for record, held in self._compare(list(chunks)) if not held}
        tokens = sum(len(record.token_ids) for record in todo.values())
        if self.decoder is None or not todo:
            return WarmEstimate(len(todo), tokens, 0, 0.0)
        longest = max((record.token_ids for record in todo.values()), key=len)
        started = time.perf_counter()
        for _ in self._encode([longest]):
            pass
        seconds = (time.perf_counter() - started) / len(longest) * tokens
        return WarmEstimate(len(todo), tokens, tokens * self.decoder.kv_bytes_per_token, seconds)

    def delete(self, ids: Iterable[str]) -> int:
        """Forget chunks: their names at once, and their KV unless another name has the same text.

        Returns
        -------
        int
            How many of the ids were known.
        """
        self._check_open()
        return self.store.forget(self._assembler.namespace, list(ids))

    def contains(self, id: str) -> bool:
        """Whether a chunk of this id is known; its KV may have been evicted, and is computed again when it is needed."""
        self._check_open()
        return self.store.lookup(self._assembler.namespace, [id])[0] is not None

    def ids(self) -> list[str]:
        """Return the ids of all known chunks of this model."""
        self._check_open()
        return self.store.names(self._assembler.namespace)

    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return what is known of each id: its tokens and the digest of its text; None where the id is unknown."""
        self._check_open()
        return self.store.lookup(self._assembler.namespace, ids)

    def prompt_ids(self, prompt: BlendPrompt) -> tuple[int, ...]:
        """Return the token ids that the model is given for `prompt`."""
        self._check_open()
        return self._assembler.assemble(prompt).layout.token_ids

    def prefill(self, prompt: BlendPrompt, *, config: BlendConfig | None = None) -> PrefillResult:
        """Prefill a prompt, blending its chunks.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.
        config : BlendConfig, optional
            Blending settings for this call (`enabled`, `recompute_ratio`, `selector` and what belongs to it, `min_tokens`).

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
        started = time.perf_counter()
        assembled = self._assemble(prompt, config)

        def forward(cache: BlendCache, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            logits: torch.Tensor = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            return logits[0, -1].cpu()

        with self._compute, torch.no_grad():
            logits, run = self._blended(assembled, config or self.config, started, 0, forward)
            ended = time.perf_counter()
        return PrefillResult(logits, assembled.layout.token_ids, self._report(assembled, run, config, ended, 0))

    def generate(
        self, prompt: BlendPrompt, max_new_tokens: int | None = None, *, config: BlendConfig | None = None, **generation_kwargs: Any
    ) -> GenerationResult:
        """Answer a prompt.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.
        max_new_tokens : int, optional
            Most tokens to generate, never beyond the model's window; by default the model's own setting, or 256.
        config : BlendConfig, optional
            Blending settings for this call.
        **generation_kwargs : Any
            Options of transformers' ``generate``, which does the decoding: sampling, stop strings, processors and so on.

        Returns
        -------
        GenerationResult
            Text, token ids and report.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        ConfigError
            If an option cannot be combined with blending.
        """
        started = time.perf_counter()
        refuse_foreign_options(generation_kwargs)
        assembled = self._assemble(prompt, config)
        return self._generate(assembled, config, started, max_new_tokens, generation_kwargs, threading.Event(), None)

    def stream(
        self, prompt: BlendPrompt, max_new_tokens: int | None = None, *, config: BlendConfig | None = None, **generation_kwargs: Any
    ) -> BlendStream:
        """Answer a prompt piece by piece; takes and raises what `generate` does, prompt errors at once.

        Returns
        -------
        BlendStream
            An iterator over pieces of text; its `result` holds the report.
        """
        started = time.perf_counter()
        refuse_foreign_options(generation_kwargs)
        assembled = self._assemble(prompt, config)

        def run(streamer: Any, stop: threading.Event) -> GenerationResult:
            return self._generate(assembled, config, started, max_new_tokens, generation_kwargs, stop, streamer)

        return BlendStream(run, self.tokenizer)

    def _generate(
        self,
        assembled: AssembledPrompt,
        config: BlendConfig | None,
        started: float,
        max_new_tokens: int | None,
        options: dict[str, Any],
        stop: threading.Event,
        streamer: Any,
    ) -> GenerationResult:
        prompt_len = len(assembled.layout)
        limit = max_new_tokens or self.model.generation_config.max_new_tokens or _DEFAULT_NEW_TOKENS
        window = model_window(self.model)
        if window is not None:
            limit = min(limit, window - max(prompt_len, max(assembled.layout.positions) + 1))
        options = dict(options)
        watch = TokenWatch(stop)
        criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), watch])
        if options.get("stop_strings"):
            options["tokenizer"] = self.tokenizer
        if options.get("pad_token_id") is None and self.model.generation_config.pad_token_id is None:
            options["pad_token_id"] = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id

        def forward(cache: BlendCache, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            output = self.model.generate(
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                past_key_values=cache,
                max_new_tokens=limit,
                stopping_criteria=criteria,
                streamer=streamer,
                **options,
            )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            return sequences[0, prompt_len:].cpu()

        with self._compute, torch.no_grad():
            generated, run = self._blended(assembled, config or self.config, started, limit, forward)
        token_ids = tuple(generated.tolist())
        report = self._report(assembled, run, config, watch.first_at or time.perf_counter(), len(token_ids))
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return GenerationResult(text, token_ids, assembled.layout.token_ids, report)

    def _blended(
        self,
        assembled: AssembledPrompt,
        config: BlendConfig,
        started: float,
        headroom: int,
        forward: Callable[[BlendCache, dict[str, torch.Tensor]], torch.Tensor],
    ) -> tuple[torch.Tensor, _Run]:
        """Run `forward` with a cache that makes its first pass the blended prefill."""
        layout = assembled.layout
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        plan = make_plan(config, layout, num_layers, self.unsupported_reason)
        inputs = {"input_ids": torch.tensor([layout.token_ids], device=self.model.device)}
        if assembled.has_positions:
            inputs["position_ids"] = torch.tensor([layout.positions], device=self.model.device)
        run = _Run(started, [], plan)
        while True:
            readers = self._readers(assembled.chunks, run) if plan.selection is not None else self._peek(assembled.chunks, run)
            cache = BlendCache(num_layers)
            run.forward_started = time.perf_counter()
            try:
                with ExitStack() as stack:
                    if plan.selection is None:
                        return forward(cache, inputs), run
                    assert self.decoder is not None
                    first = min(plan.selection.check_layers, default=0)
                    loader = stack.enter_context(
                        LayerLoader(self.decoder, layout, readers, first, len(layout) + headroom, config.prefetch_layers)
                    )
                    steering = Steering(self.decoder, cache, layout, plan.selection, loader)
                    stack.enter_context(steering())
                    output = forward(cache, inputs)
                run.wait_s, run.charge, run.recomputed = loader.wait_s, steering.charge, steering.recomputed_rows.cpu()
                return output, run
            except ChunkReadError as error:
                # Damaged KV is a miss: drop it, and the next round encodes the chunk anew.
                logger.warning("%s", error)
                self._quietly(self.store.discard, error.key)
                plan = make_plan(config, layout, num_layers, self.unsupported_reason)

    def _peek(self, chunks: Sequence[PromptChunk], run: _Run) -> list[KVReader]:
        run.hits = self.store.holds([chunk.key for chunk in chunks]) if chunks else []
        return []

    def _readers(self, chunks: Sequence[PromptChunk], run: _Run) -> list[KVReader]:
        """Open the stored KV of every chunk, encoding in one go those that have none."""
        readers: list[KVReader | None] = [self._open(chunk) for chunk in chunks]
        run.hits = run.hits or [reader is not None for reader in readers]
        missing = {chunk.key: chunk for chunk, reader in zip(chunks, readers, strict=True) if reader is None}
        if missing:
            started = time.perf_counter()
            fresh: dict[str, ChunkKV] = {}
            keys = list(missing)
            for batch in self._encode([missing[key].token_ids for key in keys]):
                for index, kv in batch:
                    fresh[keys[index]] = kv
                    self._quietly(self.store.put, keys[index], kv)
            readers = [reader or _InMemory(fresh[chunk.key]) for chunk, reader in zip(chunks, readers, strict=True)]
            run.encode_s += time.perf_counter() - started
        if chunks and not any(run.hits) and not self._warned_of_no_hit:
            self._warned_of_no_hit = True
            logger.warning(
                "none of the %d chunks of this prompt was stored, so all were encoded now; add chunks before they are asked for "
                "(this is said once)",
                len(chunks),
            )
        return [reader for reader in readers if reader is not None]

    def _open(self, chunk: PromptChunk) -> KVReader | None:
        reader = self.store.open(chunk.key)
        if reader is None:
            return None
        assert self.decoder is not None
        if reader.token_ids != chunk.token_ids or reader.num_layers != self.decoder.num_layers:
            logger.warning("stored KV %s… is not of the chunk it was stored for; it will be computed again", chunk.key[:12])
            self._quietly(self.store.discard, chunk.key)
            return None
        return reader

    def _encode(self, token_ids: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, ChunkKV]]]:
        assert self.decoder is not None
        batches = encode_chunks(self.decoder, self._assembler.prefix_ids, token_ids, self.config.encode_batch_tokens)
        while True:
            with self._compute:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _compare(self, chunks: Sequence[Chunk]) -> list[tuple[NodeRecord, bool]]:
        """Return each chunk's record, and whether it is stored exactly so."""
        names = [chunk.id for chunk in chunks if chunk.id is not None]
        known = dict(zip(names, self.store.lookup(self._assembler.namespace, names), strict=True))
        fresh = [self._assembler.record(chunk) for chunk in chunks]
        held = self.store.holds([record.key for record in fresh])
        if self.decoder is None:
            held = [True] * len(fresh)
        return [
            (record, there and (not record.id or known[record.id] == record)) for record, there in zip(fresh, held, strict=True)
        ]

    @staticmethod
    def _quietly(write: Callable[..., None], *args: Any) -> None:
        """Write to the store on the way to an answer, which a store that cannot be written does not prevent."""
        try:
            write(*args)
        except StoreError as error:
            logger.warning("the store could not be written: %s", error)

    def _assemble(self, prompt: BlendPrompt, config: BlendConfig | None) -> AssembledPrompt:
        self._check_open()
        if config is not None:
            self._check_settings(config)
        return self._assembler.assemble(prompt)

    def _report(
        self, assembled: AssembledPrompt, run: _Run, config: BlendConfig | None, first_output: float, output_tokens: int
    ) -> BlendReport:
        layout = assembled.layout
        context = layout.context_tokens
        blended = run.recomputed is not None
        rows = run.recomputed if run.recomputed is not None else layout.context_rows
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        chunks = []
        for number, (chunk, span) in enumerate(zip(assembled.chunks, layout.chunks, strict=True)):
            inside = int(((rows >= span.start) & (rows < span.stop)).sum())
            reason = chunk.note or (None if run.hits[number] else "its KV was not stored")
            chunks.append(ChunkReport(chunk.id, len(span), run.hits[number], inside, reason))
        chunks += [ChunkReport(chunk.id, len(chunk.token_ids), False, len(chunk.token_ids), chunk.note) for chunk in assembled.computed]
        return BlendReport(
            ttft_s=first_output - run.started,
            load_s=run.wait_s,
            encode_s=run.encode_s,
            recompute_s=first_output - run.forward_started - run.wait_s,
            prompt_tokens=len(layout),
            context_tokens=context,
            recomputed_tokens=rows.numel(),
            recompute_ratio=(config or self.config).recompute_ratio,
            charged_ratio=(run.charge / (context * num_layers) if blended else 1.0) if context else 0.0,
            hits=sum(run.hits),
            misses=len(run.hits) - sum(run.hits),
            selector=run.plan.selector,
            fallback_reason=run.plan.fallback_reason,
            chunks=tuple(chunks),
            output_tokens=output_tokens,
        )

    def _inspect(self) -> Decoder | None:
        try:
            decoder = inspect_model(self.model)
            if self.config.self_check:
                check_blending(decoder)
        except UnsupportedModelError as error:
            if self.config.strict:
                raise
            logger.warning("%s; its prompts are prefilled as a whole", error)
            self.unsupported_reason = str(error)
            return None
        return decoder

    def _check_settings(self, config: BlendConfig) -> None:
        from_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        from cacheblend_rag.selection import make_selector

        make_selector(config).validate(from_layers)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")
