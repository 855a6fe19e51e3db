"""Changes that blending makes inside the model, on one prompt: KV, attention, and which tokens are recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cacheblend_attachments import watch_prefill
from cacheblend_lab.settings import engine_settings, settings_of
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import AttentionCall, attention_weights
from cacheblend_rag.selection.hkvd import kv_deviation

__all__ = ["ORACLES", "InsidePass", "PromptInside", "TokenOverlap"]


@dataclass(frozen=True, slots=True)
class TokenOverlap:
    """Tokens that a question attends to, and those that methods recompute.

    Attributes
    ----------
    attention : array of float, (question_tokens, chunk_tokens)
        The question's attention to the tokens of all chunks, under full prefill.
    recomputed : mapping of str to array of int
        For each method, the tokens that it recomputes, by their place among the chunk tokens.
    top : int
        Number of high-attention tokens: those to which the question attends most in sum.
    """

    attention: NDArray[np.floating[Any]]
    recomputed: Mapping[str, NDArray[np.integer[Any]]]
    top: int

    def __post_init__(self) -> None:
        if self.attention.ndim != 2 or not 1 <= self.top <= self.attention.shape[1]:
            raise ConfigError(
                f"attention has shape {self.attention.shape} and top={self.top}; "
                "give (question_tokens, chunk_tokens), and a top of at least 1 and at most chunk_tokens"
            )
        for method, tokens in self.recomputed.items():
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.attention.shape[1]:
                raise ConfigError(
                    f"{method!r} recomputes tokens {tokens.min()} to {tokens.max()}, "
                    f"but there are {self.attention.shape[1]} chunk tokens, counted from 0"
                )

    @property
    def high_attention(self) -> NDArray[np.intp]:
        """The high-attention tokens, in order."""
        return np.sort(np.argsort(-self.attention.sum(axis=0), kind="stable")[: self.top])

    def hit_rate(self, method: str) -> float:
        """Return the share of the high-attention tokens that a method recomputes."""
        return float(np.isin(self.high_attention, self.recomputed[method]).mean())


ORACLES = ("oracle_deviation", "oracle_attention")
"""Choices that know full prefill: the tokens whose KV deviates most over all layers, and those that the question attends to
most."""

_REUSE: dict[str, Any] = {"enabled": True, "selector": "none", "recompute_ratio": 0.0}


@dataclass(frozen=True, eq=False)
class InsidePass:
    """One blended prefill beside full prefill.

    Attributes
    ----------
    charged_ratio : float
        Work on chunk tokens over (chunk tokens x layers).
    attention_deviation : NDArray
        For each layer, the L2 norm of the difference of the forward attention matrices, float64, ``(num_layers,)``. The forward
        attention matrix is what the tokens after the last chunk attend to in the chunks, in all heads (CacheBlend, section 4).
    recomputed : NDArray
        The tokens that were recomputed, by their place among the candidates, ascending.
    """

    charged_ratio: float
    attention_deviation: NDArray[np.float64]
    recomputed: NDArray[np.int64]


class PromptInside:
    """One prompt, prefilled in full, by plain reuse, and then by whatever it is compared with.

    It keeps the KV of full prefill and of plain reuse, and of full prefill's attention the queries of the question: attention
    matrices are computed layer by layer when they are compared, and dropped.

    Attributes
    ----------
    layout : PromptLayout
        Where the chunks stand. The *candidates* are its `context_rows`: the chunk tokens, whose stored KV may differ from the
        true one.
    attention : NDArray
        What the tokens after the last chunk attend to in the candidates under full prefill, mean over heads and layers,
        ``(question_tokens, candidates)``.
    attention_norm : NDArray
        For each layer, the L2 norm of full prefill's forward attention matrix, float64, ``(num_layers,)``.
    kv_deviation : NDArray
        How far the stored KV of each candidate is from full prefill's: L2 distance over heads and dimensions, of keys and values
        with equal weight, over the mean of the layer, ``(num_layers, candidates)``. Layer 0 has seen no neighbour; what is there
        is rounding.
    reuse : InsidePass
        Plain reuse of the stored KV.
    """

    def __init__(self, engine: BlendEngine, prompt: BlendPrompt) -> None:
        if engine.unsupported_reason is not None:
            raise UnsupportedModelError(f"{engine.unsupported_reason}; there is nothing to look at")
        self._engine = engine
        self._prompt = prompt
        self._calls: dict[int, AttentionCall] = {}
        self.layout: PromptLayout = engine.prompt_layout(prompt)
        if not self.layout.context_rows.numel():
            raise ConfigError("no chunk of this prompt is served from stored KV: blending changes nothing in it")
        self._question_tokens = max(1, len(self.layout) - self.layout.chunks[-1].stop)
        candidates = self.layout.context_rows
        total = np.zeros((self._question_tokens, candidates.numel()))
        norms: dict[int, float] = {}

        def remember(layer: int, call: AttentionCall) -> None:
            self._calls[layer] = _last_rows(call, self._question_tokens)
            seen = attention_weights(self._calls[layer], self._question_tokens).cpu()
            norms[layer] = float(seen.index_select(2, self.layout.context_rows).double().norm())
            np.add(total, seen.index_select(2, candidates).mean(dim=0).double().numpy(), out=total)

        whole = watch_prefill(engine, prompt, remember, blend=engine.blend.replace(enabled=False))
        self.attention_norm: NDArray[np.float64] = np.array([norms[layer] for layer in sorted(norms)])
        self.attention: NDArray[np.float64] = total / len(self._calls)
        self.reuse, stored = self._measure(_REUSE, None)
        self.kv_deviation: NDArray[np.float64] = np.stack(
            [_deviation(full, kept, candidates) for full, kept in zip(whole.kv, stored, strict=True)]
        )

    def blended(self, settings: Mapping[str, Any]) -> InsidePass:
        """Blend the prompt with some settings (`BlendConfig`)."""
        return self._measure(settings, None)[0]

    def oracle(self, name: str, ratio: float) -> InsidePass:
        """Recompute the tokens that one of `ORACLES` chooses."""
        scores = self.kv_deviation[1:].sum(axis=0) if name == "oracle_deviation" else self.attention.sum(axis=0)
        best = np.sort(np.argsort(-scores, kind="stable")[: self.budget(ratio)])
        return self._measure(_REUSE, self.layout.context_rows[torch.from_numpy(best)])[0]

    def budget(self, ratio: float) -> int:
        """Return how many tokens a ratio recomputes."""
        return min(round(ratio * self.layout.context_tokens), self.layout.context_rows.numel())

    def overlap(self, passes: Mapping[str, InsidePass], ratio: float) -> TokenOverlap:
        """Return which of the tokens that the question attends to most, as many as a ratio recomputes, passes recompute."""
        recomputed = {name: each.recomputed for name, each in passes.items()}
        return TokenOverlap(self.attention, recomputed, max(1, self.budget(ratio)))

    def _measure(self, settings: Mapping[str, Any], rows: torch.Tensor | None) -> tuple[InsidePass, list[LayerKV]]:
        context = self.layout.context_rows
        deviation = np.zeros(len(self._calls))

        def compare(layer: int, call: AttentionCall) -> None:
            # Each call can lie on a device of its own.
            blended, full = (
                attention_weights(each, self._question_tokens).cpu().index_select(2, context)
                for each in (call, self._calls[layer])
            )
            deviation[layer] = float((blended - full).double().norm())

        blend = engine_settings(settings_of(self._engine), **settings)["blend"]
        watched = watch_prefill(self._engine, self._prompt, compare, blend=blend, rows=rows)
        candidates = self.layout.context_rows
        recomputed = torch.isin(candidates, watched.recomputed_rows.cpu()).nonzero().flatten().numpy()
        return InsidePass(watched.result.report.charged_ratio, deviation, recomputed), watched.kv


def _last_rows(call: AttentionCall, count: int) -> AttentionCall:
    """Return a call that is as small as its last rows allow; the keys are the cache's own."""
    mask, bias = call.mask, call.position_bias
    return replace(
        call,
        query=call.query[:, :, -count:].clone(),
        mask=mask[:, :, -count:].clone() if mask is not None and mask.ndim == 4 else mask,
        position_bias=None if bias is None else bias[:, :, -count:].clone(),
    )


def _deviation(full: LayerKV, stored: LayerKV, rows: torch.Tensor) -> NDArray[np.float64]:
    place = rows.to(full.keys.device)
    true, kept = (LayerKV(*(tensor.index_select(2, place) for tensor in kv)) for kv in (full, stored))
    distances: NDArray[np.float64] = kv_deviation(true, kept, "both").sqrt().double().cpu().numpy()
    mean = distances.mean() if distances.size else 0.0
    return distances / mean if mean > 0 else distances
