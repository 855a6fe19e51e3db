"""Running one prompt: how it is prefilled, the forward, and what to do when a file is damaged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.controller import Controller, Plan, make_plan, whole_plan
from cacheblend_rag.engine.caches import PromptCaches
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.engine.taken import Making, Resumption
from cacheblend_rag.errors import ChunkReadError, PromptError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, num_decoder_layers, takes_positions, text_decoder
from cacheblend_rag.selection import FixedSelection
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.clock import steady_s
from cacheblend_rag.tuning import Tuning

__all__ = ["Runner"]

logger = logging.getLogger(__name__)


class Runner:
    """Runs prompts on one model and one store, one at a time.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    unsupported : str or None
        Why it cannot.
    store : KVStore
        Where KV is kept.
    supply : KVSupply
        Opens it, and encodes what is missing.
    config : EngineConfig
        The engine's settings.
    blend : BlendConfig
        Its settings of blending.
    tuning : Tuning
        How layers are loaded, what eviction looks at, and how the machine is profiled.

    Attributes
    ----------
    lock : SchedulerLock
        Lets one computation at a time have the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        unsupported: str | None,
        store: KVStore,
        supply: KVSupply,
        config: EngineConfig,
        blend: BlendConfig,
        tuning: Tuning,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._unsupported = unsupported
        self._store = store
        self._supply = supply
        self._caches = None if decoder is None else PromptCaches(model, decoder, tuning)
        self._config, self._blend, self._tuning = config, blend, tuning
        self._num_layers = num_decoder_layers(model)
        self._controller: Controller | None = None
        self.lock = supply.lock

    def run(
        self,
        run: PromptRun,
        headroom: int,
        forward: Callable[[BlendCache | None, dict[str, torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Call `forward` with the prompt's ids and a cache that makes its first pass over them the blended prefill.

        Parameters
        ----------
        run : PromptRun
            The prompt; its figures are filled in.
        headroom : int
            Tokens that will be generated at most, for which the cache keeps room.
        forward : callable
            Runs the model, with a cache of its own (None) where the model cannot be blended; called again if stored KV turns
            out damaged before its first pass is over.

        Returns
        -------
        torch.Tensor
            What `forward` returned.
        """
        inputs = {"input_ids": torch.tensor([run.prompt.layout.token_ids], device=self._model.device)}
        with self.lock.within(run.request.wait_until), torch.no_grad():
            while True:
                self._note_expiry(run)
                try:
                    readers = self._prepare(run)
                    if self._caches is None:
                        run.timings.forward_started = time.perf_counter()
                        # Its cache may hold states that ours has no place for.
                        run.outcome.kept_reason = None if run.request.blend.kv_capacity is None else self._unsupported
                        return forward(None, inputs | self._unblended(run.prompt.places))
                    with self._caches.open(run, readers, headroom) as (cache, more):
                        output = forward(cache, inputs | more)
                except ChunkReadError as error:
                    # Damaged KV is a miss: it is dropped, and the next round encodes the chunk anew.
                    logger.warning("%s", error)
                    run.kv.unreadable.add(error.key)
                    self._supply.discard(error.key)
                else:
                    self._remember(run, cache)
                    return output

    def encode_misses(self, runs: Sequence[PromptRun]) -> None:
        """Encode in one go the chunks of several prompts that have no stored KV, each once, and hand it to those prompts.

        Parameters
        ----------
        runs : sequence of PromptRun
            The prompts, before their prefill. Of those that are computed as a whole nothing is encoded.
        """
        self._supply.encode_misses([run for run in runs if run.prompt.chunks and self._blends(run)])

    def _unblended(self, places: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """Return what a model that cannot be blended is called with to put its tokens into their places.

        Raises
        ------
        PromptError
            If it takes no positions.
        """
        if places is None or list(places) == list(range(len(places))):
            return {}
        if not takes_positions(text_decoder(self._model)):
            raise PromptError(
                f"the prompt places its segments, and {type(self._model).__name__} takes no positions; leave positions out"
            )
        return {"position_ids": torch.tensor([list(places)], device=self._model.device)}

    def controller(self) -> Controller:
        """Return the controller that chooses ratios, for a model that can be blended; call it under `lock`."""
        assert self._decoder is not None
        if self._controller is None:
            self._controller = Controller(self._decoder, self._blend, self._tuning, self._store)
        return self._controller

    def _prepare(self, run: PromptRun) -> list[KVReader] | None:
        """Decide how a prompt is prefilled; return readers of its chunks' KV, or None where it is computed as a whole."""
        blend, given, layout = run.request.blend, run.request.rows, run.prompt.layout
        # After damaged KV this is asked again, and the choice between blending and not may fall otherwise.
        run.resumed = run.head = None
        run.kv.head_tokens = 0
        ratio = blend.recompute_ratio if given is None else 0.0
        run.plan = whole_plan(blend, layout, self._refusal(layout), ratio)
        if run.plan is None and ratio == "auto":
            # If not even free loading makes blending pay, nothing need be opened.
            run.plan = self._choice(run, None)[1]
        if run.plan is not None:
            return self._whole(run)
        if ratio != "auto":
            self._resume(run, Making.of(blend, ratio))
        found = self._supply.open_all(run)
        if self._supply.limit_misses(run, [key for key, reader in found.items() if reader is None]):
            return self._prepare(run)
        if ratio == "auto":
            ratio, run.plan = self._choice(
                run, [reader for chunk in run.prompt.chunks if (reader := found[chunk.key]) is not None]
            )
            if run.plan is not None:
                return self._whole(run)
            self._resume(run, Making.of(blend, ratio))
        readers = self._supply.readers(run, found)
        if given is not None:
            given = given[torch.isin(given, layout.context_rows)]
            run.plan = Plan(FixedSelection(given), "given", given.numel() / layout.context_tokens)
        else:
            run.plan = make_plan(blend, run.layout, self._num_layers, ratio)
        return readers if run.resumed is None else run.resumed.merge(readers)

    def _choice(self, run: PromptRun, readers: Sequence[KVReader] | None) -> tuple[float, Plan | None]:
        """Return the ratio that "auto" stands for, and the plan of a prompt that is computed as a whole at it."""
        blend, layout = run.request.blend, run.prompt.layout
        choice = self.controller().choose(blend, layout, readers)
        if choice.fallback_reason is not None:
            return choice.ratio, Plan(None, "full", fallback_reason=choice.fallback_reason)
        return choice.ratio, None if readers is None else whole_plan(blend, layout, None, choice.ratio)

    def _whole(self, run: PromptRun) -> list[KVReader] | None:
        """Have a prompt computed as a whole, but for what it takes over."""
        self._resume(run, None)
        if not run.kv.hits:
            held = 0 if run.resumed is None else run.resumed.chunks
            run.kv.hits = [True] * held + self._store.holds([chunk.key for chunk in run.prompt.chunks[held:]])
        return None if run.resumed is None else []

    def _blends(self, run: PromptRun) -> bool:
        """Return whether a prompt is blended, as far as that is known before its stored KV is opened."""
        blend, layout, ratio = run.request.blend, run.prompt.layout, run.request.blend.recompute_ratio
        if whole_plan(blend, layout, self._refusal(layout), ratio) is not None:
            return False
        if ratio != "auto":
            return True
        with self.lock.within(run.request.wait_until):
            return self.controller().choose(blend, layout, None).fallback_reason is None

    def _resume(self, run: PromptRun, asked: Making | None) -> None:
        """Take over the fixed head, and what the conversation has computed if this is a turn of one, where blending is on.

        Parameters
        ----------
        run : PromptRun
            The prompt.
        asked : Making or None
            How it is blended; None where it is computed as a whole.
        """
        if not run.request.blend.enabled or self._refusal(run.prompt.layout) is not None:
            return
        assert self._decoder is not None
        head = run.prompt.head
        rows = 0 if head is None else head.rows
        if run.request.conversation is not None:
            moves = asked is not None and self._decoder.is_movable
            run.resumed = run.request.conversation.resume(run.prompt, asked, moves=moves, head=rows)
        if run.resumed is not None and run.kv.hits:
            # What the conversation has at its place is a hit, whether or not the store was asked first.
            run.kv.hits[: run.resumed.chunks] = [True] * run.resumed.chunks
        if head is not None and (run.resumed is None or run.resumed.head):
            run.resumed = run.resumed or Resumption.of_head(run.prompt.layout, rows, asked)
            run.head = self._supply.head(run, head)

    def _note_expiry(self, run: PromptRun) -> None:
        """Note until when the KV of a turn's chunks may be used.

        Before it is opened: what expires in between is a miss by then, and lives longer than was noted.
        """
        if run.request.conversation is None:
            return
        keys = list({chunk.key: None for chunk in (*run.prompt.chunks, *run.prompt.computed)})
        default, now = self._config.ttl_s, steady_s()
        for key, life in zip(keys, self._store.lifetimes(keys), strict=True):
            # A miss is stored for that long, and what is computed with the prompt should live no longer.
            seconds = life if life is not None else (math.inf if default is None else default)
            run.kv.expiry[key] = now + seconds

    def _remember(self, run: PromptRun, cache: BlendCache) -> None:
        """Let the conversation keep what was computed, if it is whole."""
        plan = run.plan
        if (
            run.request.conversation is None
            or plan is None
            or self._refusal(run.prompt.layout, len(run.outcome.output_ids)) is not None
        ):
            return
        # Nothing was computed for a stream that was closed before its turn came.
        layers = cache.kv_layers[: self._supply.num_kv_layers]
        if all(layer.held_tokens and not layer.evicted_tokens for layer in layers):
            run.request.conversation.keep(
                run.prompt,
                run.outcome.output_ids,
                cache.kv(),
                run.resumed,
                None if plan.selection is None else Making.of(run.request.blend, plan.ratio),
                expiry=run.kv.expiry,
                resets=run.request.resets,
            )

    def _refusal(self, layout: PromptLayout, output_tokens: int = 0) -> str | None:
        """Return why this model cannot be blended, or not on this prompt and an answer of so many tokens."""
        reach = None if self._decoder is None else self._decoder.rope_reach
        end = layout.end_position + output_tokens
        if reach is not None and end >= reach:
            return (
                f"the prompt ends at position {end}, and from {reach} on the rotary frequencies of this model "
                "depend on the length of the prompt"
            )
        return self._unsupported
