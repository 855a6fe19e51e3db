"""The profile of a model on a machine, and what follows from it: the recompute ratio, and whether to blend at all.

CacheBlend (section 5) has two delay estimators: how long recomputing takes at a ratio, and how long loading takes from a
device. Here both are fitted to measurements (`Profile`), and put together by playing the pipeline through: the loader is a
bounded number of layers ahead, each layer waits for its KV. Everything in this file is a pure function.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

__all__ = [
    "SLACK",
    "BlendCost",
    "Choice",
    "LoadCost",
    "PrefillCost",
    "Point",
    "Profile",
    "StoredKV",
    "Work",
    "blend_s",
    "choose",
    "largest_hidden_ratio",
    "layer_compute_s",
    "layer_load_s",
    "pipeline_s",
]

SLACK = 0.02
"""Share of TTFT by which two predictions may differ and count as equal: what is recomputed hides if it adds no more."""

_RATIO_STEPS = 100

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Point:
    """A prefill that computed some rows of a prompt, all of them in full prefill, and loaded nothing."""

    rows: Count
    tokens: Count
    seconds: Amount


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of full prefill: a prompt, a token, and a token times the prompt's tokens (attention)."""

    fixed_s: Amount
    per_token_s: Amount
    per_pair_s: Amount

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a prompt of that many tokens."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * tokens * tokens


@dataclass(frozen=True, slots=True)
class BlendCost:
    """Seconds of the blended part of a prefill, loading apart: a prompt (hooks, embedding, head), and what each layer takes.

    That is a token of the prompt, computed or not (merging fresh KV into stored KV, the check layer's probe), a computed row,
    and such a row times the prompt's tokens (attention).
    """

    fixed_s: Amount
    per_token_s: Amount
    per_row_s: Amount
    per_pair_s: Amount


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Seconds of loading from one tier in one codec, a chunk and layer and a stored byte: reading, decoding, putting together.

    `overlap` is the share of the loading that could hide behind computing, and does: 1 where the two do not slow each other.
    A token takes `bytes_per_token` there, all layers together.
    """

    tier: str
    codec: str
    per_read_s: Amount
    per_byte_s: Amount
    overlap: Annotated[float, Field(ge=0, le=1)]
    bytes_per_token: Amount

    def layer_s(self, chunks: int, layer_bytes: float) -> float:
        """Return the seconds of loading one layer of that many chunks, `layer_bytes` stored bytes in all."""
        return self.per_read_s * chunks + self.per_byte_s * layer_bytes


@dataclass(frozen=True)
class Profile:
    """Times that one model takes on one machine to compute and to load, in seconds.

    Attributes
    ----------
    identity : dict
        The model's architecture, device, threads, dtype and selector, by `profile_identity`: what the figures hold for.
    num_layers : int
        Decoder layers of the model.
    prefill, blend : PrefillCost, BlendCost
        Fitted to the points below.
    prefill_points, blend_points : tuple
        What was measured.
    loads : tuple of LoadCost
        One for each tier and codec measured.
    measured_s : float
        Seconds that the measuring took.
    """

    identity: dict[str, str]
    num_layers: Annotated[int, Field(ge=1)]
    prefill: PrefillCost
    blend: BlendCost
    prefill_points: tuple[Point, ...]
    blend_points: tuple[Point, ...]
    loads: tuple[LoadCost, ...]
    measured_s: Amount

    def load_cost(self, tier: str, codec: str) -> LoadCost | None:
        """Return the cost of loading from a tier in a codec, or None where it was not measured."""
        return next((cost for cost in self.loads if (cost.tier, cost.codec) == (tier, codec)), None)

    def layer_s(self, tokens: int) -> float:
        """Return the seconds of one layer of full prefill."""
        return (self.prefill.seconds(tokens) - self.prefill.fixed_s) / self.num_layers


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Chunks of one prompt that come from one tier in one codec; `kv_bytes` is what they take there, all layers together."""

    tier: str
    codec: str
    chunks: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one prompt; of its chunks' tokens, all but those of a chunk that is exact as stored are candidates.

    Layers from `first_layer` on need stored KV. The loader may be `ahead` of the computation by so many layers, and runs
    beside it if it is `threaded`: layers may be too small for that to pay.
    """

    prompt_tokens: int
    context_tokens: int
    candidate_tokens: int
    first_layer: int
    ahead: int
    threaded: bool
    stored: tuple[StoredKV, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision of the controller for one prompt: a ratio, 1 in full prefill, for which there may be a reason.

    The predictions, blended (at the quality floor, if the prompt is to be prefilled in full) and in full, are None without a
    profile.
    """

    ratio: float
    blend_s: float | None = None
    full_s: float | None = None
    fallback_reason: str | None = None


def blend_s(profile: Profile, work: Work, ratio: float) -> float:
    """Return the predicted seconds of a blended prefill; tiers that the profile does not know load for nothing."""
    after = profile.num_layers - work.first_layer
    computes = [profile.layer_s(work.prompt_tokens)] * work.first_layer
    computes += [layer_compute_s(profile, work, ratio)] * after
    load_s, overlap = layer_load_s(profile, work)
    serial = profile.blend.fixed_s + sum(computes) + after * load_s
    if not load_s or not work.threaded:
        return serial
    # Loading takes cores and memory bandwidth from computing; what share of it truly runs beside was measured.
    ideal = profile.blend.fixed_s + pipeline_s(computes, [load_s] * after, work.first_layer, work.ahead)
    return serial - overlap * (serial - ideal)


def layer_compute_s(profile: Profile, work: Work, ratio: float) -> float:
    """Return the predicted seconds of recomputing one layer after the selection: T_recompute in CacheBlend (section 5)."""
    cost, tokens = profile.blend, work.prompt_tokens
    rows = tokens - work.context_tokens + min(round(ratio * work.context_tokens), work.candidate_tokens)
    return cost.per_token_s * tokens + cost.per_row_s * rows + cost.per_pair_s * rows * tokens


def layer_load_s(profile: Profile, work: Work) -> tuple[float, float]:
    """Return the predicted seconds of loading one layer, T_load in CacheBlend (section 5), and how well that overlaps.

    Tiers load one after another; one that the profile does not know loads for nothing.
    """
    seconds = overlap = 0.0
    for part in work.stored:
        cost = profile.load_cost(part.tier, part.codec)
        if cost is not None:
            layer_s = cost.layer_s(part.chunks, part.kv_bytes / profile.num_layers)
            seconds += layer_s
            overlap += layer_s * cost.overlap
    return seconds, overlap / seconds if seconds else 1.0


def pipeline_s(computes: Sequence[float], loads: Sequence[float], first_layer: int, ahead: int) -> float:
    """Return when the last layer is computed if loading and computing do not slow each other.

    Layers from `first_layer` on are loaded, at most `ahead` before the one that is computed; the loader starts on another when
    one is taken from it.
    """
    computed = sum(computes[:first_layer])
    loaded = 0.0
    taken: list[float] = []
    for number, load in enumerate(loads):
        room = taken[number - ahead - 1] if number > ahead else 0.0
        loaded = max(loaded, room) + load
        taken.append(max(computed, loaded))
        computed = taken[-1] + computes[first_layer + number]
    return computed


def largest_hidden_ratio(profile: Profile, work: Work, quality_ratio: float) -> float:
    """Return the largest ratio whose recompute hides behind loading (CacheBlend, section 5).

    It is a hundredth under 1, or the quality floor r* itself: the largest at which the predicted prefill takes at most `SLACK`
    longer than at the floor.
    """
    allowed = blend_s(profile, work, quality_ratio) * (1 + SLACK)
    # Time never falls with the ratio, so the steps that are allowed come first.
    steps = range(int(quality_ratio * _RATIO_STEPS), _RATIO_STEPS)
    fitting = bisect_right(steps, allowed, key=lambda step: blend_s(profile, work, step / _RATIO_STEPS))
    return max((steps.start + fitting - 1) / _RATIO_STEPS, quality_ratio)


def choose(profile: Profile, work: Work, quality_ratio: float) -> Choice:
    """Decide how a prompt is prefilled: blended at the largest ratio that adds no delay, or in full.

    Full prefill is the best quality there is, so it is taken wherever it is not slower than blending at the quality floor r*.
    """
    whole, floor = profile.prefill.seconds(work.prompt_tokens), blend_s(profile, work, quality_ratio)
    if quality_ratio >= 1 or whole <= floor * (1 + SLACK):
        reason = (
            f"full prefill of {work.prompt_tokens} tokens is predicted to be no slower than blending them "
            f"({1000 * whole:.3g} ms against {1000 * floor:.3g} ms)"
        )
        return Choice(1.0, floor, whole, reason)
    ratio = largest_hidden_ratio(profile, work, quality_ratio)
    return Choice(ratio, blend_s(profile, work, ratio), whole)
