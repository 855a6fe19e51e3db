"""The policy against brute force: the same questions answered by trying everything."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_attachments.auto import load_profile, profile_identity, save_profile
from cacheblend_attachments.auto.measure import fit_costs
from cacheblend_attachments.auto.policy import (
    SLACK,
    BlendCost,
    LoadCost,
    Point,
    PrefillCost,
    Profile,
    StoredKV,
    Work,
    blend_s,
    choose,
    largest_hidden_ratio,
    pipeline_s,
)
from cacheblend_rag.model import inspect_model
from tests.families import tiny_model

LAYERS = 8
BYTES_PER_TOKEN = 8192.0


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


IDENTITY = {"architecture": "a", "device": "cpu", "threads": "1"}
PROFILE = Profile(
    identity=IDENTITY,
    num_layers=4,
    prefill=PrefillCost(0.1, 0.01, 1e-6),
    blend=BlendCost(0.1, 0.0, 1e-3, 1e-7),
    prefill_points=(Point(16, 16, 0.3), Point(64, 64, 0.8)),
    blend_points=(Point(20, 64, 0.2),),
    loads=(LoadCost("ram", "native", 1e-6, 1e-10, 0.9, 1024.0), LoadCost("disk", "native", 1e-5, 1e-9, 0.5, 1024.0)),
    measured_s=3.5,
)

amounts = st.floats(0, 1e6, allow_nan=False)
points = st.lists(st.builds(Point, st.integers(0, 10**6), st.integers(0, 10**6), amounts), max_size=3).map(tuple)
stored_profiles = st.builds(
    Profile,
    identity=st.just(IDENTITY),
    num_layers=st.integers(1, 200),
    prefill=st.builds(PrefillCost, amounts, amounts, amounts),
    blend=st.builds(BlendCost, amounts, amounts, amounts, amounts),
    prefill_points=points,
    blend_points=points,
    loads=st.lists(
        st.builds(LoadCost, st.text(max_size=8), st.text(max_size=8), amounts, amounts, st.floats(0, 1), amounts),
        max_size=3,
    ).map(tuple),
    measured_s=amounts,
)


@given(stored_profiles)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.mktemp("profile") / "deep" / "p.json"
    assert load_profile(path, IDENTITY) is None
    save_profile(path, profile)
    assert load_profile(path, IDENTITY) == profile
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\x00\xff", "[" * 100_000, '{"identity": {}}'])
def test_what_is_no_profile_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    assert load_profile(path, IDENTITY) is None
    assert load_profile(tmp_path, IDENTITY) is None
    assert caplog.text.count("measured again") == 2


def test_another_machines_profile_is_named_foreign(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "p.json"
    save_profile(path, PROFILE)
    assert load_profile(path, IDENTITY | {"threads": "2"}) is None
    assert "another threads" in caplog.text


def test_the_identity_is_the_architectures_and_not_the_weights() -> None:
    first, second, other = (inspect_model(tiny_model(name)) for name in ("llama", "llama", "qwen2"))
    next(second.model.parameters()).data.add_(1.0)
    identity = profile_identity(first, "hkvd", (1,))
    assert identity == profile_identity(second, "hkvd", (1,)) != profile_identity(first, "random", ())
    assert identity["architecture"] != profile_identity(other, "hkvd", (1,))["architecture"]


factors = st.floats(1e-3, 1e3)


@given(factors, factors, factors)
def test_the_fit_finds_what_made_the_figures(a: float, b: float, c: float) -> None:
    points = [1.0, 2.0, 5.0, 11.0, 30.0]
    amounts = [(1.0, x, x * x) for x in points]
    seconds = [a + b * x + c * x * x for x in points]
    fitted = fit_costs(amounts, seconds)
    found = [sum(f * amount for f, amount in zip(fitted, row, strict=True)) for row in amounts]
    assert found == pytest.approx(seconds, rel=1e-3)
    assert all(factor >= 0 for factor in fitted)
