"""Single timed runs of the parts that serve prompts, on random tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller.plan import check_selector
from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.fuse import BlendCache, LayerSource, Steering
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import Selection, SelectionTask
from cacheblend_rag.store.base import KVReader

__all__ = ["QUESTION_TOKENS", "Loading", "ScratchKV", "TimedRuns"]

QUESTION_TOKENS = 15
_SAMPLE_TOKENS = 8


class ScratchKV:
    """A layer source whose layers are there at once, all of them in the same memory: what is in them takes no part in the
    time.

    Parameters
    ----------
    sample : sequence of LayerKV
        One layer each of the model's own KV, for its shape and dtype.
    decoder : Decoder
        The model.
    rows : int
        Tokens of the prompt.
    """

    def __init__(self, sample: Sequence[LayerKV], decoder: Decoder, rows: int) -> None:
        self._buffers: dict[tuple[torch.Size, torch.device], LayerKV] = {}
        self._layers = []
        for layer, kv in enumerate(sample):
            device = next(decoder.layers[layer].parameters()).device
            known = (kv.keys.shape, device)
            if known not in self._buffers:
                self._buffers[known] = LayerKV(*(t.new_zeros((1, t.shape[0], rows, t.shape[2])).to(device) for t in kv))
            self._layers.append(self._buffers[known])

    def synchronize(self, layer: int) -> LayerKV:
        """Return a layer."""
        return self._layers[layer]


@dataclass(frozen=True)
class Loading:
    """Chunks of random KV, and the prompt that is made of them."""

    layout: PromptLayout
    chunks: tuple[ChunkKV, ...]


class TimedRuns:
    """Runs one model once at a time, in seconds.

    Parameters
    ----------
    decoder : Decoder
        The model.
    config : BlendConfig
        Selector, check layers and `prefetch_layers`.
    most_tokens : int
        Tokens of the longest prompt.

    Attributes
    ----------
    sample : ChunkKV
        The KV of a few tokens.
    """

    def __init__(self, decoder: Decoder, config: BlendConfig, most_tokens: int) -> None:
        self._decoder = decoder
        self._config = config
        self.selector = check_selector(config, decoder.num_layers)
        vocabulary = decoder.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary, (most_tokens,), generator=generator).tolist()
        few = self._ids[1 : 1 + _SAMPLE_TOKENS]
        [(_, self.sample)] = next(Encoder(decoder, self._ids[:1], _SAMPLE_TOKENS + 1).encode([Target(tuple(few))]))

    def layout(self, chunks: Sequence[int]) -> PromptLayout:
        """Return a prompt of one token, chunks of so many tokens, and a question."""
        spans, place = [], 1
        for tokens in chunks:
            spans.append(ChunkSpan(place, place + tokens, place))
            place += tokens
        length = place + QUESTION_TOKENS
        ids = (self._ids * (length // len(self._ids) + 1))[:length]
        return PromptLayout(tuple(ids), tuple(range(length)), tuple(spans))

    def loading(self, chunks: int, tokens: int) -> Loading:
        """Return so many chunks of so many tokens; their KV is the sample's, repeated."""
        sample = self.sample
        parts = []
        for number in range(chunks):
            ids = self._ids[1 + number * tokens : 1 + (number + 1) * tokens]
            repeats = -(-len(ids) // len(sample.token_ids))
            layers = [
                LayerKV(*(t.repeat(1, repeats, 1)[:, : len(ids)].contiguous() for t in kv)) for kv in sample.layers
            ]
            parts.append(ChunkKV(tuple(ids), sample.start, layers))
        return Loading(self.layout([len(part.token_ids) for part in parts]), tuple(parts))

    def selection(self, layout: PromptLayout, ratio: float) -> Selection:
        """Return a new selection for a prompt."""
        budget = round(ratio * layout.context_tokens)
        return self.selector.begin(SelectionTask(layout, self._decoder.num_layers, budget))

    def first_layer(self) -> int:
        """Return the first layer that needs stored KV."""
        return min(self.selection(self.layout([1]), 0.0).check_layers, default=0)

    def full(self, tokens: int) -> float:
        """Prefill so many tokens as a whole."""
        return self._timed(lambda: self._forward(BlendCache(self._decoder.num_layers), self._ids[:tokens]))

    def blend(self, layout: PromptLayout, ratio: float, source: LayerSource) -> float:
        """Prefill a prompt blended."""
        return self._timed(lambda: self._blend(layout, ratio, source))

    def load(self, layout: PromptLayout, readers: Sequence[KVReader]) -> float:
        """Load all layers of a prompt and do nothing else."""

        def run() -> None:
            with self._loader(layout, readers, 0) as loader:
                for layer in range(self._decoder.num_kv_layers):
                    loader.synchronize(layer)

        return self._timed(run)

    def loaded_blend(self, layout: PromptLayout, readers: Sequence[KVReader], ratio: float) -> float:
        """Prefill a prompt blended, loading meanwhile."""
        first_layer = self.first_layer()

        def run() -> None:
            with self._loader(layout, readers, first_layer) as loader:
                self._blend(layout, ratio, loader)

        return self._timed(run)

    def _blend(self, layout: PromptLayout, ratio: float, source: LayerSource) -> None:
        cache = BlendCache(self._decoder.num_layers)
        steering = Steering(self._decoder, cache, layout, self.selection(layout, ratio), source)
        with steering():
            self._forward(cache, layout.token_ids)

    def _loader(self, layout: PromptLayout, readers: Sequence[KVReader], first_layer: int) -> LayerLoader:
        threads = self._config.load_threads if self._config.pipeline else 0
        return LayerLoader(
            self._decoder, layout, readers, first_layer, len(layout), self._config.prefetch_layers, threads
        )

    def _forward(self, cache: BlendCache, ids: Sequence[int]) -> None:
        rows = torch.tensor([ids], device=self._decoder.device)
        self._decoder.model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _timed(self, run: Callable[[], None]) -> float:
        self._synchronize()
        started = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)
