"""The policy against brute force: the same questions answered by trying everything."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheblend_attachments.auto.policy import (
    SLACK,
    BlendCost,
    LoadCost,
    PrefillCost,
    Profile,
    StoredKV,
    Work,
    blend_s,
    cheapest_tier,
    choose,
    largest_hidden_ratio,
    layer_compute_s,
    layer_load_s,
    pipeline_s,
)
from cacheblend_rag.errors import ConfigError

LAYERS = 8
BYTES_PER_TOKEN = 8192.0
GB = 1_000_000_000


def make_profile(
    *loads: LoadCost, fixed_s: float = 0.01, row_s: float = 1e-5, pair_s: float = 0.0, token_s: float = 1e-4
) -> Profile:
    costs = PrefillCost(0.002, token_s, pair_s * LAYERS), BlendCost(fixed_s, 1e-7, row_s, pair_s)
    return Profile({}, LAYERS, *costs, prefill_points=(), blend_points=(), loads=loads, measured_s=0.0)


def make_load(tier: str, bytes_per_s: float, overlap: float = 1.0, read_s: float = 1e-5) -> LoadCost:
    return LoadCost(tier, "native", read_s, 1 / bytes_per_s, overlap, BYTES_PER_TOKEN)


def make_work(chunks: int, tokens: int, tier: str | None, *, threaded: bool = True, first_layer: int = 1) -> Work:
    context = chunks * tokens
    stored = () if tier is None else (StoredKV(tier, "native", chunks, round(context * BYTES_PER_TOKEN)),)
    return Work(context + 32, context, context, first_layer, 2, threaded, stored)


def simulated(computes: list[float], loads: list[float], first_layer: int, ahead: int) -> float:
    """The pipeline in small steps of events: at most `ahead` + 1 layers loaded or being loaded and not yet taken."""
    now, computing, loading = 0.0, 0, 0
    compute_ends: float | None = None
    load_ends: float | None = None
    taken = loaded = 0
    while computing < len(computes):
        if load_ends is None and loading < len(loads) and loading - taken <= ahead:
            load_ends = now + loads[loading]
            loading += 1
        if compute_ends is None:
            number = computing - first_layer
            if number < 0 or loaded > number:
                taken = max(number + 1, 0)
                compute_ends = now + computes[computing]
                continue
        now = min(moment for moment in (compute_ends, load_ends) if moment is not None)
        if load_ends == now:
            load_ends, loaded = None, loaded + 1
        if compute_ends == now:
            compute_ends, computing = None, computing + 1
    return now


durations = st.integers(0, 50).map(float)


@given(st.data())
def test_the_pipeline_is_the_one_played_through_event_by_event(data: st.DataObject) -> None:
    computes = data.draw(st.lists(durations, min_size=1, max_size=8))
    first_layer = data.draw(st.integers(0, len(computes)))
    loads = data.draw(st.lists(durations, min_size=len(computes) - first_layer, max_size=len(computes) - first_layer))
    ahead = data.draw(st.integers(1, 4))
    assert pipeline_s(computes, loads, first_layer, ahead) == simulated(computes, loads, first_layer, ahead)


profiles = st.builds(
    lambda rate, overlap, fixed, row, pair, token, read: make_profile(
        make_load("disk", rate, overlap, read), fixed_s=fixed, row_s=row, pair_s=pair, token_s=token
    ),
    st.floats(1e6, 1e11),
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
    st.floats(0, 1e-2),
    st.floats(0, 1e-3),
)
works = st.builds(
    lambda chunks, tokens, tier, threaded, first: make_work(chunks, tokens, tier, threaded=threaded, first_layer=first),
    st.integers(1, 12),
    st.integers(1, 600),
    st.sampled_from(["disk", None, "never measured"]),
    st.booleans(),
    st.integers(0, LAYERS - 1),
)
floors = st.floats(0, 1)


@given(profiles, works, floors)
def test_the_hidden_ratio_is_the_largest_of_all_hundredths(profile: Profile, work: Work, floor: float) -> None:
    ratio = largest_hidden_ratio(profile, work, floor)
    assert floor <= ratio <= 1
    allowed = blend_s(profile, work, floor) * (1 + SLACK)
    fitting = [r / 100 for r in range(100) if r / 100 > floor and blend_s(profile, work, r / 100) <= allowed]
    assert ratio == max(fitting, default=floor)


@given(profiles, works, floors)
def test_the_choice_is_within_the_slack_of_the_fastest_allowed(profile: Profile, work: Work, floor: float) -> None:
    choice = choose(profile, work, floor)
    whole = profile.prefill.seconds(work.prompt_tokens)
    taken = whole if choice.fallback_reason else blend_s(profile, work, choice.ratio)
    tried = [blend_s(profile, work, ratio) for ratio in [floor, *(step / 100 for step in range(100))] if ratio >= floor]
    if floor < 1:
        assert taken <= min([whole, *tried]) * (1 + SLACK) * (1 + 1e-9)
    assert (choice.ratio == 1.0) if choice.fallback_reason else (choice.ratio >= floor)


@given(profiles, works, floors)
def test_loading_never_makes_a_prompt_faster(profile: Profile, work: Work, floor: float) -> None:
    free = replace(work, stored=())
    assert blend_s(profile, work, floor) >= blend_s(profile, free, floor) * (1 - 1e-9)
    if choose(profile, free, floor).fallback_reason:
        # Why nothing need be opened when not even free loading makes blending pay.
        assert choose(profile, work, floor).fallback_reason


@given(st.integers(2, 12), st.integers(64, 512), st.floats(1e7, 1e10), st.floats(1.1, 50))
def test_a_slower_device_hides_no_less(chunks: int, tokens: int, rate: float, factor: float) -> None:
    work = make_work(chunks, tokens, "disk")
    fast, slow = make_profile(make_load("disk", rate)), make_profile(make_load("disk", rate / factor))
    # A layer's own recompute can show once, before the first layer has come or after the last.
    assert largest_hidden_ratio(slow, work, 0.15) >= largest_hidden_ratio(fast, work, 0.15) - 0.05


def test_recompute_hides_behind_a_slow_device_as_the_paper_has_it() -> None:
    work = make_work(8, 512, "disk")
    profile = make_profile(make_load("disk", 1e8), row_s=5e-6, fixed_s=0.0)
    ratio = largest_hidden_ratio(profile, work, 0.15)
    load_s, _ = layer_load_s(profile, work)
    assert ratio > 0.15
    assert layer_compute_s(profile, work, ratio) <= load_s * 1.1
    # From a fast device nothing hides, and the floor is what is left.
    fast = make_profile(make_load("disk", 1e12, read_s=0.0), row_s=5e-6, fixed_s=0.0)
    assert largest_hidden_ratio(fast, work, 0.15) == pytest.approx(0.15, abs=0.02)


TIERS = {"ram": 1e10, "ssd": 3e9, "disk": 2e8}


@given(
    st.integers(1, 12),
    st.integers(1, 600),
    st.floats(0.05, 0.9),
    st.dictionaries(st.sampled_from([*TIERS, "tape"]), st.floats(0, 10), min_size=1),
)
# Neighbouring floats, the price of whose bytes is rounded to one: the smallest there are, and ordinary ones.
@example(1, 1, 0.5, {"ram": 1e-323, "ssd": 5e-324})
@example(3, 1, 0.5, {"ram": math.nextafter(7.58, 8), "ssd": 7.58})
def test_the_cheapest_tier_without_delay(chunks: int, tokens: int, ratio: float, prices: dict[str, float]) -> None:
    profile = make_profile(*(make_load(tier, rate) for tier, rate in TIERS.items()))
    work = make_work(chunks, tokens, "ram")
    usable = [tier for tier in TIERS if tier in prices]
    if not usable:
        with pytest.raises(ConfigError, match="no tier is both priced"):
            cheapest_tier(profile, work, ratio, prices)
        return
    times = {tier: blend_s(profile, make_work(chunks, tokens, tier), ratio) for tier in usable}
    without_delay = [tier for tier in usable if times[tier] <= min(times.values()) * (1 + SLACK)]
    choice = cheapest_tier(profile, work, ratio, prices)
    assert choice.tier in without_delay
    assert prices[choice.tier] == min(prices[tier] for tier in without_delay)
    assert choice.price == pytest.approx(prices[choice.tier] * chunks * tokens * BYTES_PER_TOKEN / GB)
    assert (choice.blend_s, choice.fastest_s) == (times[choice.tier], min(times.values()))


@pytest.mark.parametrize("price", [-1.0, float("nan")])
def test_a_price_without_meaning_is_named(price: float) -> None:
    with pytest.raises(ConfigError, match="the price of tier 'ram'"):
        cheapest_tier(make_profile(make_load("ram", 1e9)), make_work(1, 9, "ram"), 0.15, {"ram": price})


def test_loading_from_two_tiers_takes_as_long_as_from_both() -> None:
    profile = make_profile(make_load("ram", 1e10, overlap=1.0), make_load("disk", 1e8, overlap=0.5))
    both = replace(
        make_work(2, 256, None), stored=(StoredKV("ram", "native", 1, 10**6), StoredKV("disk", "native", 1, 10**6))
    )
    seconds, overlap = layer_load_s(profile, both)
    ram, disk = (profile.load_cost(tier, "native") for tier in ("ram", "disk"))
    assert ram is not None
    assert disk is not None
    parts = ram.layer_s(1, 10**6 / LAYERS), disk.layer_s(1, 10**6 / LAYERS)
    assert seconds == pytest.approx(sum(parts))
    assert overlap == pytest.approx((parts[0] + 0.5 * parts[1]) / sum(parts))
