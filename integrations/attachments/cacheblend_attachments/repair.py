"""Decode-time repair: chunk rows that an output token attends to are recomputed while the answer is written.

At the end of a prompt it is not yet visible which stale rows matter: the position that writes a value is the one that looks
for it. So each step of decoding is watched. Where it attends to rows whose stored KV has not seen its neighbours, the heaviest
of them are recomputed in one forward together with the newest token, whose step that redoes. What was repaired stays repaired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cacheblend_attachments.watching import Watching, look_layers, watch_forward
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.backend import RunningForward
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import (
    CACHE,
    AttentionCall,
    Decoder,
    attention_weights,
    watch_attention,
)
from cacheblend_rag.selection import Selection

__all__ = ["Repair", "Repairing"]

_SEGMENT_TOKENS = 32


class Repair(Watching):
    """Recomputes chunk rows that the answer depends on while it is written; their count is `BlendReport.repaired_tokens`.

    Parameters
    ----------
    budget : float
        Most work that it may do while one answer is written, as a share of what recomputing all chunk tokens would take, 0 to 1.
    limit : float
        The share of a step's attention, 0 to 1, that must go to a stale segment, of up to 32 tokens, for it to be repaired.
    look_layers : sequence of int, optional
        Layers in which steps are watched, ascending; by default those from a quarter to three quarters of the depth.
    stop_layer : int, optional
        The layer from which on repaired rows are not computed any more; by default two thirds of the depth.

    Raises
    ------
    ConfigError
        If a value has no meaning.
    """

    def __init__(
        self,
        budget: float,
        *,
        limit: float = 0.05,
        look_layers: Sequence[int] | None = None,
        stop_layer: int | None = None,
    ) -> None:
        for name, value in (("budget", budget), ("limit", limit)):
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r:.40} of a repair must be a number from 0 to 1")
        looks = None if look_layers is None else tuple(look_layers)
        if looks is not None and (not looks or looks[0] < 0 or any(a >= b for a, b in pairwise(looks))):
            raise ConfigError(f"look_layers={looks} must be layer indices from 0 on, ascending, at least one")
        if stop_layer is not None and (type(stop_layer) is not int or stop_layer < 1):
            raise ConfigError(f"stop_layer={stop_layer!r:.40} must be a layer from 1 on, or None")
        self.budget, self.limit = budget, limit
        self.look_layers, self.stop_layer = looks, stop_layer

    def attached(self, engine: BlendEngine) -> None:
        super().attached(engine)
        assert engine.decoder is not None
        look_layers(self.look_layers, engine.decoder.num_layers)
        _stop_layer(self.stop_layer, engine.decoder.num_layers)

    @contextmanager
    def around(self, forward: RunningForward) -> Iterator[None]:
        if forward.steering is None:
            yield
            return
        repairing = Repairing(self, forward.decoder, forward.cache, forward.request.layout, forward.steering)
        with repairing():
            yield
        forward.request.state.charge += repairing.charge
        forward.request.state.figures["repaired_tokens"] = repairing.repaired_rows

    def for_tenant(self) -> Repair:
        return Repair(self.budget, limit=self.limit, look_layers=self.look_layers, stop_layer=self.stop_layer)


class Repairing:
    """Watches one answer being decoded and repairs the chunk KV that it depends on.

    What the blended prefill has not recomputed by the first step is stale. The work is charged in decoder-block rows, redone
    steps and the scores of watched layers included.
    """

    def __init__(
        self, asked: Repair, decoder: Decoder, cache: BlendCache, layout: PromptLayout, prefill: Steering
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._layout = layout
        self._prefill = prefill
        self._stale: torch.Tensor | None = None
        self._ids = list(layout.token_ids)
        self._positions = list(layout.positions)
        self._watched = look_layers(asked.look_layers, decoder.num_layers)
        self._stop_layer = _stop_layer(asked.stop_layer, decoder.num_layers)
        self._limit = asked.limit
        self._budget = asked.budget * layout.context_tokens * decoder.num_layers
        self._mass: torch.Tensor | None = None
        self._layer = 0
        self._busy = False
        self.charge = 0.0
        self.repaired_rows = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch and repair for the duration of a ``with`` block, from the first step after the prefill on."""
        with (
            watch_forward(self._decoder.model, before=self._before_step, after=self._after_step),
            watch_attention(self._watch),
        ):
            yield

    def _before_step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_step(kwargs):
            if self._stale is None:
                rows = self._layout.context_rows.to(self._decoder.device)
                self._stale = rows[~torch.isin(rows, self._prefill.recomputed_rows)]
            self._layer = 0
            # Watching costs, too: no step is watched that cannot be redone for a single row.
            if self._stale.numel() and self._affordable() > 0:
                self._mass = torch.zeros(len(self._layout), device=self._decoder.device)

    def _is_step(self, kwargs: dict[str, Any]) -> bool:
        ids = kwargs.get("input_ids")
        return (
            not self._busy
            and kwargs.get(CACHE) is self._cache
            and self._cache.steering is None
            and isinstance(ids, torch.Tensor)
            and ids.shape[1] == 1
        )

    def _watch(self, call: AttentionCall) -> None:
        if self._mass is None or self._busy:
            return
        layer, self._layer = self._layer, self._layer + 1
        if layer in self._watched:
            heads, _, width = call.query.shape[1:]
            self.charge += 2 * heads * width * call.key.shape[2] / self._decoder.row_flops
            weights = attention_weights(call, 1)[:, 0, : len(self._layout)].mean(dim=0)
            self._mass += weights.to(self._mass.device) / len(self._watched)

    def _after_step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self._is_step(kwargs):
            return None
        mass, self._mass = self._mass, None
        positions = kwargs.get("position_ids")
        self._ids.append(int(kwargs["input_ids"][0, 0]))
        self._positions.append(self._positions[-1] + 1 if positions is None else int(positions.flatten()[-1]))
        if mass is None:
            return None
        rows = self._rows_to_repair(mass)
        if not rows.numel():
            return None
        output.logits = self._redo(rows)
        return output

    def _rows_to_repair(self, mass: torch.Tensor) -> torch.Tensor:
        """Return the stale rows of the heaviest segments, as far as the budget goes; none where little attention goes there."""
        stale = self._stale
        assert stale is not None
        weights = mass[stale]
        segments = segment_numbers(self._layout, stale, _SEGMENT_TOKENS)
        totals = torch.zeros(int(segments[-1]) + 1, device=weights.device).index_add_(0, segments, weights)
        heavy = (totals > self._limit)[segments]
        return pick_segments(weights[heavy], stale[heavy], self._affordable(), self._layout, _SEGMENT_TOKENS)

    def _affordable(self) -> int:
        """Return how many rows can still be repaired, besides the redone step."""
        depth = self._stop_layer or self._decoder.num_layers
        return int((self._budget - self.charge - self._decoder.num_layers) // depth)

    def _redo(self, rows: torch.Tensor) -> torch.Tensor:
        """Recompute chunk rows and the newest token in one forward; return the logits for the newest token."""
        decoder = self._decoder
        assert self._stale is not None
        layout = PromptLayout(tuple(self._ids), tuple(self._positions), self._layout.chunks)
        newest = torch.tensor([len(self._ids) - 1])
        selection = Selection(rows, stop_layer=self._stop_layer)
        cache = BlendCache(decoder.num_layers)
        # The layers themselves, not copies: what is written into them is written into the cache.
        steering = Steering(decoder, cache, layout, selection, self._cache.kv().__getitem__, text_rows=newest)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([self._ids], device=decoder.device)}
        if decoder.takes_positions:
            inputs["position_ids"] = torch.tensor([self._positions], device=decoder.device)
        if decoder.model._supports_logits_to_keep():  # type: ignore[operator]  # as generate asks
            inputs["logits_to_keep"] = 1
        self._busy = True
        try:
            with steering():
                logits: torch.Tensor = decoder.model(**inputs, **{CACHE: cache}, use_cache=True).logits[:, -1:]
        finally:
            self._busy = False
        self.charge += steering.charge + decoder.num_layers
        self.repaired_rows += rows.numel()
        self._stale = self._stale[~torch.isin(self._stale, rows)]
        return logits


def _stop_layer(asked: int | None, num_layers: int) -> int | None:
    """Return from which layer on no chunk token is recomputed, None for no layer; `ConfigError` beyond the last."""
    # By measurement on a small model the first two thirds of the layers carry what a chunk's tokens take from other chunks.
    stop = -(-2 * num_layers // 3) if asked is None else asked
    if stop > num_layers:
        raise ConfigError(
            f"stop_layer={stop} is beyond the model's {num_layers} layers; stop_layer={num_layers} recomputes in all of them"
        )
    return stop if stop < num_layers else None


def segment_numbers(layout: PromptLayout, rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return the segment of each chunk row, from 0 on: chunks are cut into as few of at most `most` rows as possible."""
    starts: list[int] = []
    for span in layout.chunks:
        count = -(-len(span) // most)
        starts += [span.start + number * len(span) // count for number in range(count)]
    return torch.searchsorted(torch.tensor(starts, device=rows.device), rows, right=True) - 1


def pick_segments(
    scores: torch.Tensor, rows: torch.Tensor, budget: int, layout: PromptLayout, most: int
) -> torch.Tensor:
    """Return at most `budget` rows of the segments with the highest mean score, ascending, the best of the last segment.

    A token's KV is computed from the tokens before it in its sentence as much as from other chunks. Recomputed alone among
    stale neighbours, it stays stale; recomputed with them, it does not.
    """
    if budget <= 0 or not rows.numel():
        return rows[:0]
    # Earlier segments first among equals; a token's own score decides where not all of one fit.
    order = scores.double().argsort(descending=True, stable=True)
    numbers = segment_numbers(layout, rows, most)
    total = torch.zeros(int(numbers[-1]) + 1, dtype=torch.float64, device=scores.device)
    total.index_add_(0, numbers, scores.double())
    means = (total / torch.bincount(numbers).clamp_min(1))[numbers]
    order = order[numbers[order].argsort(stable=True)]
    chosen = order[means[order].argsort(descending=True, stable=True)][:budget]
    return rows[chosen.sort().values]
