"""The part of an engine that prefills prompts, and conversations of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import Profile
from cacheblend_rag.engine.chunks import ChunkEngine
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.firsttoken import last_logits
from cacheblend_rag.engine.generation import PrefillResult
from cacheblend_rag.engine.guard import Guard
from cacheblend_rag.engine.metrics import EngineMetrics
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.run import PromptRun
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.watch import LayerWatcher, WatchedForward, WatchedPrefill
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import num_decoder_layers
from cacheblend_rag.pml.prompt import Prompt
from cacheblend_rag.report import BlendReport
from cacheblend_rag.store import KVStore

__all__ = ["PrefillEngine"]

logger = logging.getLogger(__name__)


class PrefillEngine(ChunkEngine):
    """Prefills prompts made of chunks, one at a time. `BlendEngine`, which answers them, is one.

    What it is made with, and the errors of that, are those of `BlendEngine`.

    Attributes
    ----------
    metrics : EngineMetrics
        What the engine has done, for Prometheus.
    guard : Guard
        Compares some answers with full prefill in the background, if ``config.guard_rate`` is above 0, and says which settings
        are in force.
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
        self._runner = Runner(model, self.decoder, self.unsupported_reason, self.store, self._supply, self.config)
        whole = self._assembler.with_whole_documents
        self.guard = Guard(model, tokenizer, self.decoder, self._runner, self.config, whole)
        self.metrics = EngineMetrics(self.store.stats, self.guard.status if self.guard.active else None)

    def close(self, *, wait: bool = True) -> None:
        """Write what waits to be written and close the store, unless it was handed in.

        A computation under way ends first; calls that wait for it fail. Answers that the guard has not compared yet are not.

        Nothing that `add` returned for is lost either way: a chunk that is not encoded yet keeps its name, and is a miss. What
        fails in the background meanwhile is logged; call `flush` first to have it raised.

        Parameters
        ----------
        wait : bool
            Whether chunks that were added in the background are encoded first, as at the end of a ``with`` block; a block that
            ends by an error does not wait.
        """
        self.guard.close()
        super().close(wait=wait)

    def conversation(self, max_bytes: int | None = None) -> Conversation:
        """Begin a conversation, whose turns reuse what the turns before have computed.

        Parameters
        ----------
        max_bytes : int, optional
            Most bytes of KV that it keeps, in the memory in which the model computes; by default it is only bound by
            ``config.conversation_bytes``, which all conversations of this engine share.

        Returns
        -------
        Conversation
            To be given to `generate`, `stream` or `prefill` with each turn; it says itself what is reused, and how exactly.

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

    def profile(self, *, budget_s: float | None = None, progress: Callable[[str], None] | None = None) -> Profile:
        """Measure how fast this model computes and loads here, and keep it for ``recompute_ratio="auto"``.

        Random tokens are prefilled and blended, and random KV is put into each tier of the store and read. Prompts wait
        meanwhile.

        Parameters
        ----------
        budget_s : float, optional
            About how many seconds it may take; ``config.profile_budget_s`` by default. More gives longer prompts and more
            repetitions.
        progress : callable, optional
            Called with what is measured now.

        Returns
        -------
        Profile
            What was measured; it is used from now on, and kept on disk.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended.
        ConfigError
            If `budget_s` is not above 0.
        """
        self._check_open()
        if self.unsupported_reason is not None:
            raise UnsupportedModelError(f"{self.unsupported_reason}; there is nothing to profile")
        budget = self.config.profile_budget_s if budget_s is None else budget_s
        if not 0 < budget < math.inf:
            raise ConfigError(f"a time limit of {budget} s leaves nothing to measure; give some seconds, 5 for example")
        with self._runner.lock:
            return self._runner.controller().measure(budget, progress)

    def prompt_ids(self, prompt: BlendPrompt | Prompt) -> tuple[int, ...]:
        """Return the token ids that the model is given for `prompt`."""
        return self.prompt_layout(prompt).token_ids

    def prompt_layout(self, prompt: BlendPrompt | Prompt) -> PromptLayout:
        """Return where the chunks of `prompt` stand among its tokens."""
        self._check_open()
        return self._assembler.assemble(self._blend_prompt(prompt)).layout

    def whole_documents(self, prompt: BlendPrompt | Prompt) -> BlendPrompt | None:
        """Return a prompt with whole documents, each in the place of the first of its chunks, instead of the chunks.

        Its full prefill knows all that the chunks of `prompt` remember, and is what answers from these are compared with.

        Parameters
        ----------
        prompt : BlendPrompt or Prompt
            The prompt.

        Returns
        -------
        BlendPrompt or None
            The prompt in token ids; the same tokens where no chunk is a piece of a document, and None where the documents do not
            fit the model's window.
        """
        self._check_open()
        ids = self._assembler.with_whole_documents(self._assembler.assemble(self._blend_prompt(prompt)))
        return None if ids is None else BlendPrompt(segments=[ids])

    def prefill(
        self,
        prompt: BlendPrompt | Prompt,
        *,
        config: BlendConfig | None = None,
        conversation: Conversation | None = None,
    ) -> PrefillResult:
        """Prefill a prompt, blending its chunks.

        Parameters
        ----------
        prompt : BlendPrompt or Prompt
            The prompt.
        config : BlendConfig, optional
            Blending settings for this call (`enabled`, `recompute_ratio`, `quality_ratio`, `selector` and what belongs to it,
            `min_tokens`).
        conversation : Conversation, optional
            The conversation that this is a turn of.

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
        run = self._begin(prompt, config, conversation)

        def forward(cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return last_logits(self.model, inputs, cache)

        logits = self._runner.run(run, 0, forward)
        report = run.report(num_decoder_layers(self.model), time.perf_counter(), 0)
        self._observe(report)
        return PrefillResult(logits, run.prompt.layout.token_ids, report)

    def watch_prefill(
        self,
        prompt: BlendPrompt | Prompt,
        watcher: LayerWatcher,
        *,
        config: BlendConfig | None = None,
        rows: torch.Tensor | None = None,
    ) -> WatchedPrefill:
        """Prefill a prompt as `prefill` does, and show what each layer attends to; nothing is evicted, and all text is computed.

        Parameters
        ----------
        prompt : BlendPrompt or Prompt
            The prompt.
        watcher : callable
            Called with each layer's number and its `AttentionCall`, as the layers come. Where stored KV turns out damaged, the
            prompt is run again, and the layers come again from the first.
        config : BlendConfig, optional
            Blending settings for this call.
        rows : torch.Tensor, optional
            The rows of chunk tokens to recompute, ascending, int64, instead of those that the selector would choose.

        Returns
        -------
        WatchedPrefill
            The result, the layout of the prompt, which rows were recomputed, and the KV.

        Raises
        ------
        PromptError
            If the prompt cannot be served.
        ConfigError
            If the settings do not fit the model, or `rows` are not rows of chunks, each once and in order.
        UnsupportedModelError
            If the model's attention cannot be watched.
        """
        config = (self.config if config is None else config).replace(kv_capacity=None)
        run = self._begin(prompt, config)
        layout = run.prompt.layout
        if rows is not None and not (
            bool((rows[1:] > rows[:-1]).all()) and bool(torch.isin(rows, layout.context_rows).all())
        ):
            raise ConfigError(
                "rows must be rows of chunk tokens, each once and ascending; `WatchedPrefill.layout.context_rows` are all of them"
            )
        run.rows, run.prompt = rows, replace(run.prompt, head=None)
        forward = WatchedForward(self.model, watcher)
        logits = self._runner.run(run, 0, forward)
        report = run.report(num_decoder_layers(self.model), time.perf_counter(), 0)
        self._observe(report)
        # Chunks whose documents were changed meanwhile are text now.
        layout = run.prompt.layout
        recomputed = layout.context_rows if run.recomputed is None else run.recomputed
        return WatchedPrefill(PrefillResult(logits, layout.token_ids, report), layout, recomputed, forward.kv)

    def _observe(self, report: BlendReport) -> None:
        """Count and log what was answered, and read ahead what may be asked for next."""
        self.metrics.observe(report)
        self.schemas.read_ahead(chunk.id for chunk in report.chunks)
        if logger.isEnabledFor(logging.INFO):
            # Formatters that write fields, as JSON for example, find the figures under "blend".
            logger.info("%s", report, extra={"blend": report.to_dict()})

    def _begin(
        self, prompt: BlendPrompt | Prompt, config: BlendConfig | None, conversation: Conversation | None = None
    ) -> PromptRun:
        """Return the run of a prompt under the settings in force for it, which is checked and in tokens, but not computed."""
        started = time.perf_counter()
        self._check_open()
        if conversation is not None and not conversation.belongs_to(self._kept):
            raise ConfigError(
                "the conversation is one with another engine, whose KV is of no use here; make it by this engine's conversation()"
            )
        # Before all that takes time: what is reset from now on forgets this turn too.
        resets = 0 if conversation is None else conversation.resets
        self._weights.check()
        prompt = self._blend_prompt(prompt)
        if config is None or config is self.config:
            order = self.guard.order
            assembled = self._assemble(prompt, order.config)
            if assembled.layout.remembers:
                # What the guard falls back to knows less than these chunks.
                order = replace(order, config=self.config, action=None)
            return PromptRun(
                assembled,
                order.config,
                started,
                guard_level=order.level,
                guard_action=order.action,
                conversation=conversation,
                resets=resets,
            )
        config = self.check_config(config)
        return PromptRun(self._assemble(prompt, config), config, started, conversation=conversation, resets=resets)

    def _assemble(self, prompt: BlendPrompt, config: BlendConfig) -> AssembledPrompt:
        assembled = self._assembler.assemble(prompt, retrieving=config.enabled)
        if config.enabled:
            self._prefetcher.claim(chunk.key for chunk in assembled.chunks)
        return assembled

    def _blend_prompt(self, prompt: BlendPrompt | Prompt) -> BlendPrompt:
        if isinstance(prompt, Prompt):
            return self.schemas.blend_prompt(prompt)
        if not isinstance(prompt, BlendPrompt):
            raise ConfigError(
                f"the prompt is a {type(prompt).__name__}; give a BlendPrompt, as in BlendPrompt(text, chunks), or a schema's "
                "prompt"
            )
        return prompt
