"""The profile of a model on a machine, and what follows from it: the recompute ratio, the tier, whether to blend at all.

CacheBlend (section 5) has two delay estimators: how long recomputing takes at a ratio, and how long loading takes from a
device. Here both are fitted to measurements (`Profile`), and put together by playing the pipeline through: the loader is a
bounded number of layers ahead, each layer waits for its KV. Everything in this file is a pure function.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from cacheblend_rag.errors import ConfigError

__all__ = [
    "SLACK",
    "BlendCost",
    "BlendPoint",
    "Choice",
    "LoadCost",
    "PrefillCost",
    "PrefillPoint",
    "Profile",
    "StoredKV",
    "TierChoice",
    "Work",
    "blend_s",
    "cheapest_tier",
    "choose",
    "largest_hidden_ratio",
    "layer_compute_s",
    "layer_load_s",
    "pipeline_s",
]

SLACK = 0.02
"""Share of TTFT by which two predictions may differ and count as equal: what is recomputed hides if it adds no more."""

_RATIO_STEPS = 100
_GIGABYTE = 1_000_000_000

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Full prefill of a number of tokens, the least disturbed run of several."""

    tokens: Count
    seconds: Amount


@dataclass(frozen=True, slots=True)
class BlendPoint:
    """Blended prefill without loading, computing some rows of a prompt; the least disturbed run of several."""

    rows: Count
    tokens: Count
    seconds: Amount


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Full prefill as a function of its length.

    Attributes
    ----------
    fixed_s, per_token_s, per_pair_s : float
        Seconds a prompt, a token, and a token times the prompt's tokens (attention).
    """

    fixed_s: Amount
    per_token_s: Amount
    per_pair_s: Amount

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a prompt of that many tokens."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * tokens * tokens


@dataclass(frozen=True, slots=True)
class BlendCost:
    """The blended part of a prefill, loading apart, for one layer; `fixed_s` for the whole prompt.

    Attributes
    ----------
    fixed_s : float
        Seconds a prompt: hooks, embedding, head.
    per_token_s : float
        Seconds a token of the prompt and layer, computed or not: merging fresh KV into stored KV, the check layer's probe.
    per_row_s, per_pair_s : float
        Seconds a computed row and layer, and a computed row times the prompt's tokens (attention).
    """

    fixed_s: Amount
    per_token_s: Amount
    per_row_s: Amount
    per_pair_s: Amount


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Loading from one tier in one codec: reading, decoding, and putting the layer together.

    Attributes
    ----------
    tier, codec : str
        Where the KV is, and how its tensors are compressed.
    per_read_s, per_byte_s : float
        Seconds a chunk and layer, and a stored byte.
    overlap : float
        Share of the loading that could hide behind computing, and does: 1 where the two do not slow each other.
    bytes_per_token : float
        Stored bytes of one token, all layers together.
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
    prefill_points: tuple[PrefillPoint, ...]
    blend_points: tuple[BlendPoint, ...]
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
    """The work of one prompt.

    Attributes
    ----------
    prompt_tokens, context_tokens : int
        Tokens of the whole prompt, and of its chunks.
    candidate_tokens : int
        Chunk tokens that may be recomputed: all but those of a chunk that is exact as stored.
    first_layer : int
        The first layer that needs stored KV; the ones before are computed in full.
    ahead : int
        How many layers the loader may be ahead of the computation.
    threaded : bool
        Whether layers are loaded while others are computed; False where they are too small for that to pay.
    stored : tuple of StoredKV
        Where the chunks' KV is; empty when loading is to cost nothing.
    remembers : bool
        Whether chunks know of text that the prompt does not hold, so that full prefill is no better quality.
    """

    prompt_tokens: int
    context_tokens: int
    candidate_tokens: int
    first_layer: int
    ahead: int
    threaded: bool
    stored: tuple[StoredKV, ...] = ()
    remembers: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision of the controller for one prompt.

    Attributes
    ----------
    ratio : float
        The recompute ratio; 1 where the prompt is to be prefilled in full.
    blend_s, full_s : float or None
        Predicted seconds of the prefill, blended at the ratio (or, if it is to be done in full, at the quality floor) and in
        full; None without a profile.
    fallback_reason : str or None
        Why the prompt is to be prefilled in full, if it is.
    """

    ratio: float
    blend_s: float | None = None
    full_s: float | None = None
    fallback_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The cheapest place for KV that adds no delay.

    Attributes
    ----------
    tier, codec : str
        The place, and how tensors are compressed there.
    blend_s : float
        Predicted seconds of a blended prefill from it.
    fastest_s : float
        Predicted seconds from the fastest place.
    price : float
        What keeping these chunks there costs a month, in the unit of the prices.
    """

    tier: str
    codec: str
    blend_s: float
    fastest_s: float
    price: float


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

    Full prefill is the best quality there is, so it is taken wherever it is not slower than blending at the
    quality floor r*; unless chunks remember their documents, which then would be forgotten. A recomputed token forgets too, so
    of such prompts nothing is recomputed.
    """
    whole, floor = profile.prefill.seconds(work.prompt_tokens), blend_s(profile, work, quality_ratio)
    if work.remembers:
        return Choice(0.0, blend_s(profile, work, 0.0), whole)
    if quality_ratio >= 1 or whole <= floor * (1 + SLACK):
        reason = (
            f"full prefill of {work.prompt_tokens} tokens is predicted to be no slower than blending them "
            f"({1000 * whole:.3g} ms against {1000 * floor:.3g} ms)"
        )
        return Choice(1.0, floor, whole, reason)
    ratio = largest_hidden_ratio(profile, work, quality_ratio)
    return Choice(ratio, blend_s(profile, work, ratio), whole)


def cheapest_tier(profile: Profile, work: Work, ratio: float, prices: Mapping[str, float]) -> TierChoice:
    """Return where KV is kept at the lowest price without adding delay (CacheBlend, section 5).

    Parameters
    ----------
    profile : Profile
        What was measured.
    work : Work
        The prompt; where its KV is now does not matter.
    ratio : float
        The recompute ratio.
    prices : mapping of str to float
        For each tier that may be used, what a gigabyte (10^9 bytes) costs there a month.

    Returns
    -------
    TierChoice
        The cheapest of those from which the prefill is predicted to take at most `SLACK` longer than from the fastest one.

    Raises
    ------
    ConfigError
        If a price is negative, or no tier was both priced and measured.
    """
    for tier, price in prices.items():
        if not price >= 0:
            raise ConfigError(f"the price of tier {tier!r} is {price}; give the price per GB and month, 0 or more")
    chunks = max(sum(part.chunks for part in work.stored), 1)
    offers = []
    for cost in profile.loads:
        if cost.tier in prices:
            kv_bytes = round(cost.bytes_per_token * work.context_tokens)
            there = replace(work, stored=(StoredKV(cost.tier, cost.codec, chunks, kv_bytes),))
            price = prices[cost.tier] * kv_bytes / _GIGABYTE
            offers.append((blend_s(profile, there, ratio), price, cost))
    if not offers:
        measured = ", ".join(sorted({cost.tier for cost in profile.loads})) or "none"
        raise ConfigError(
            f"no tier is both priced ({', '.join(sorted(prices)) or 'none'}) and measured ({measured}); name measured ones"
        )
    fastest = min(seconds for seconds, _, _ in offers)
    seconds, price, cost = min(
        (offer for offer in offers if offer[0] <= fastest * (1 + SLACK)),
        # What the same bytes cost at two prices may be rounded to one number.
        key=lambda offer: (offer[1], prices[offer[2].tier], offer[0]),
    )
    return TierChoice(cost.tier, cost.codec, seconds, fastest, price)
