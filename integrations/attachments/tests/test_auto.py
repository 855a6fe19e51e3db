"""`AutoRatio` from end to end on a tiny model: what is predicted is what is done."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_attachments import AutoRatio, Guard
from cacheblend_attachments.auto import profile_identity, save_profile
from cacheblend_attachments.auto.policy import BlendCost, LoadCost, PrefillCost, Profile
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from tests.engines import damage
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(30, seed), f"n{seed}") for seed in range(6)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_profile(
    path: Path, engine: BlendEngine, *, fixed_s: float, disk_bytes_per_s: float = 1e12, row_s: float = 1e-6
) -> None:
    """A made-up machine, for this engine's model."""
    assert engine.decoder is not None
    per_token = float(engine.decoder.kv_bytes_per_token)
    loads = (
        LoadCost("ram", "native", 0.0, 1e-12, 1.0, per_token),
        LoadCost("disk", "native", 0.0, 1 / disk_bytes_per_s, 1.0, per_token),
    )
    costs = PrefillCost(0.001, 1e-3, 0.0), BlendCost(fixed_s, 0.0, row_s, 0.0)
    profile = Profile(
        profile_identity(engine.decoder, "hkvd", (1,)), engine.decoder.num_layers, *costs, (), (), loads, 0.0
    )
    save_profile(path, profile)


def make_engine(path: Path, store: Path | None = None, auto: Any = None, **settings: Any) -> BlendEngine:
    given = engine_settings(strict=True, selector="hkvd", **settings)
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer(), **given, store=store)
    engine.attach(AutoRatio(path=path, **(auto or {})))
    return engine


def attached(engine: BlendEngine) -> Any:
    return engine._runner.attachments[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


@pytest.fixture
def engine(path: Path) -> Iterator[BlendEngine]:
    with make_engine(path) as engine:
        write_profile(path, engine, fixed_s=0.05)
        engine.add(CHUNKS)
        yield engine


def prompt(chunks: list[Chunk]) -> BlendPrompt:
    return BlendPrompt(words(4, 90), chunks, words(6, 91))


def test_one_short_chunk_is_computed_as_a_whole(engine: BlendEngine) -> None:
    result = engine.prefill(prompt(CHUNKS[:1]))
    report = result.report
    assert report.fallback_reason is not None
    assert "predicted to be no slower" in report.fallback_reason
    assert (report.recompute_ratio, report.selector, report.hits) == (1.0, "full", 1)
    whole = engine.prefill(prompt(CHUNKS[:1]), blend=engine.blend.replace(enabled=False))
    torch.testing.assert_close(result.logits, whole.logits)


def test_a_long_prompt_is_blended_at_the_chosen_ratio(engine: BlendEngine) -> None:
    report = engine.prefill(prompt(CHUNKS)).report
    assert report.fallback_reason is None
    assert 0.15 <= report.recompute_ratio < 1
    fixed = engine.blend.replace(recompute_ratio=report.recompute_ratio)
    again = engine.prefill(prompt(CHUNKS), blend=fixed)
    assert again.report.recomputed_tokens == report.recomputed_tokens
    torch.testing.assert_close(again.logits, engine.prefill(prompt(CHUNKS)).logits)


def test_the_engines_ratio_is_a_floor_too(path: Path) -> None:
    with make_engine(path, recompute_ratio=0.4) as engine:
        write_profile(path, engine, fixed_s=0.05)
        engine.add(CHUNKS)
        assert 0.4 <= engine.prefill(prompt(CHUNKS)).report.recompute_ratio < 1
        # What a guard raises.
        guard = engine.attach(Guard(action="raise"))
        guard._adopt(guard._next("why"))
        assert 0.5 <= engine.prefill(prompt(CHUNKS)).report.recompute_ratio < 1
        assert engine.prefill(prompt(CHUNKS), blend=BlendConfig(selector="random")).report.recompute_ratio >= 0.4


def test_it_serves_tenants_and_is_detached(engine: BlendEngine) -> None:
    chosen = engine.prefill(prompt(CHUNKS)).report.recompute_ratio
    with engine.for_tenant("mara") as other:
        other.add(CHUNKS)
        assert attached(other)._profile == attached(engine)._profile is not None
        assert other.prefill(prompt(CHUNKS)).report.recompute_ratio == chosen
    attached(engine).close()
    assert engine.prefill(prompt(CHUNKS)).report.recompute_ratio == 0


def test_a_fixed_ratio_is_an_order(engine: BlendEngine) -> None:
    report = engine.prefill(prompt(CHUNKS[:1]), blend=engine.blend.replace(recompute_ratio=0.2)).report
    assert (report.fallback_reason, report.recompute_ratio) == (None, 0.2)


def test_a_slower_tier_gives_a_larger_ratio(path: Path, tmp_path: Path) -> None:
    ratios = []
    for number, rate in enumerate((1e12, 4e5)):
        with make_engine(path, tmp_path / str(number), ram_bytes=0) as engine:
            # Layers this small are loaded when they are asked for, and hide nothing: recompute has to be cheap beside them.
            write_profile(path, engine, fixed_s=1e-4, disk_bytes_per_s=rate, row_s=1e-6)
            engine.add(CHUNKS)
            ratios.append(engine.prefill(prompt(CHUNKS)).report.recompute_ratio)
    assert 0.15 <= ratios[0] < ratios[1]


def test_the_first_use_measures_and_keeps_it_beside_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = engine_settings(strict=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=tmp_path / "kv") as engine:
                engine.attach(AutoRatio(budget_s=0.3))
                engine.add(CHUNKS)
                for chunks in (CHUNKS, CHUNKS[:1]):
                    assert engine.prefill(prompt(chunks)).report.recompute_ratio >= 0.15
    assert caplog.text.count("measuring the speed") == 1
    [file] = (tmp_path / "kv" / "profiles").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    # What was put on disk to be measured is gone.
    assert not list((tmp_path / "kv" / "tmp").glob("*.part"))


def test_without_a_store_it_is_kept_in_the_users_cache(tmp_path: Path) -> None:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(strict=True)) as engine:
        said: list[str] = []
        profile = engine.attach(AutoRatio()).profile(budget_s=0.3, progress=said.append)
        assert {(cost.tier, cost.codec) for cost in profile.loads} == {("ram", "native")}
        assert "full prefill" in said and profile.prefill_points and profile.blend_points
    assert len(list((tmp_path / "cache" / "cacheblend-rag" / "profiles").iterdir())) == 1


def test_a_budget_of_nothing_never_measures(path: Path) -> None:
    with make_engine(path, auto={"budget_s": 0.0, "quality_ratio": 0.3}) as engine:
        engine.add(CHUNKS)
        assert engine.prefill(prompt(CHUNKS)).report.recompute_ratio == 0.3
        assert not path.exists()
        with pytest.raises(ConfigError, match="leaves no time to measure"):
            attached(engine).profile()


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with make_engine(blocked / "profile.json", auto={"budget_s": 0.2}) as engine:
        engine.add(CHUNKS)
        assert engine.prefill(prompt(CHUNKS)).report.recompute_ratio >= 0.15
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("value", ["Auto", None, [], float("nan"), 1.1])
def test_an_option_without_meaning_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"quality_ratio=.* must be a number from 0 to 1"):
        AutoRatio(value)
    with pytest.raises(ConfigError, match="must be a finite number of seconds"):
        AutoRatio(budget_s=-1)
    with pytest.raises(ConfigError, match=r"recompute_ratio='auto': must be a number; engine.attach\(AutoRatio"):
        BlendConfig(recompute_ratio="auto")


def test_what_an_earlier_prompt_begins_with_is_kept_where_kv_is_damaged(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with make_engine(path, folder, ram_bytes=0, device_bytes=0, prefix_bytes=2**26) as engine:
        write_profile(path, engine, fixed_s=0.0)
        engine.add(CHUNKS)
        engine.generate(BlendPrompt(segments=[words(10, 90), *CHUNKS[:3], words(6, 91)]), 4)
        record = engine.records(["n4"])[0]
        assert record is not None and record.later is not None
        [file] = (each for each in folder.rglob(f"{record.later.key}*") if each.is_file())
        damage(file)
        segments = [words(10, 90), *CHUNKS[:3], CHUNKS[4], CHUNKS[5], words(6, 92)]
        report = engine.generate(BlendPrompt(segments=segments), 4).report
        # Chunks are recomputed in part, so what stands before them.
        assert (report.prefix_tokens, report.hits, report.misses) == (1 + 10, 4, 1)
