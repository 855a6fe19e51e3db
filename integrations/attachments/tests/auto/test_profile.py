"""A profile's file, and the fit: what cannot be trusted is measured again."""

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments.auto import load_profile, profile_identity, save_profile
from cacheblend_attachments.auto.measure import fit_costs
from cacheblend_attachments.auto.policy import BlendCost, BlendPoint, LoadCost, PrefillCost, PrefillPoint, Profile
from cacheblend_rag.model import inspect_model
from tests.families import tiny_model

IDENTITY = {"architecture": "a", "device": "cpu", "threads": "1"}
PROFILE = Profile(
    identity=IDENTITY,
    num_layers=4,
    prefill=PrefillCost(0.1, 0.01, 1e-6),
    blend=BlendCost(0.1, 0.0, 1e-3, 1e-7),
    prefill_points=(PrefillPoint(16, 0.3), PrefillPoint(64, 0.8)),
    blend_points=(BlendPoint(20, 64, 0.2),),
    loads=(LoadCost("ram", "native", 1e-6, 1e-10, 0.9, 1024.0), LoadCost("disk", "native", 1e-5, 1e-9, 0.5, 1024.0)),
    measured_s=3.5,
)

amounts = st.floats(0, 1e6, allow_nan=False)
stored_profiles = st.builds(
    Profile,
    identity=st.just(IDENTITY),
    num_layers=st.integers(1, 200),
    prefill=st.builds(PrefillCost, amounts, amounts, amounts),
    blend=st.builds(BlendCost, amounts, amounts, amounts, amounts),
    prefill_points=st.lists(st.builds(PrefillPoint, st.integers(0, 10**6), amounts), max_size=3).map(tuple),
    blend_points=st.lists(st.builds(BlendPoint, st.integers(0, 10**6), st.integers(0, 10**6), amounts), max_size=3).map(
        tuple
    ),
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


@settings(max_examples=60)
@given(st.data())
def test_no_changed_byte_is_trusted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.json"
    save_profile(path, PROFILE)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 3))])
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(whole)
    # A change that means nothing in JSON may leave it whole, never different.
    assert load_profile(path, IDENTITY) in (None, PROFILE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "cacheblend-rag profile 9"}, "not in the format"),
        ({"digest": "0" * 32}, "does not match its digest"),
        ({"profile": 3}, "does not match its digest"),
    ],
)
def test_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "p.json"
    save_profile(path, PROFILE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        assert load_profile(path, IDENTITY) is None
    assert reason in caplog.text
    assert "measured again" in caplog.text


@pytest.mark.parametrize("value", [-1.0, "fast", None])
def test_a_figure_without_meaning(tmp_path: Path, caplog: pytest.LogCaptureFixture, value: object) -> None:
    path = tmp_path / "p.json"
    save_profile(path, replace(PROFILE, measured_s=value))  # type: ignore[arg-type]
    assert load_profile(path, IDENTITY) is None
    assert "damaged or not ours" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\x00\xff", "[" * 100_000, '{"format": "x"}'])
def test_what_is_no_profile_is_not_trusted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    assert load_profile(path, IDENTITY) is None
    assert load_profile(tmp_path, IDENTITY) is None


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


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6))
def test_no_fitted_factor_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    fitted = fit_costs([(1.0, x, x * x) for x in range(1, len(seconds) + 1)], seconds)
    assert all(0 <= factor < float("inf") for factor in fitted)
    assert any(fitted)
