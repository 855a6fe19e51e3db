"""The bench of "auto", the emulated device, the figures, and the commands, on a tiny shape."""

import json
from pathlib import Path

import pytest

from cacheblend_lab.bench.auto import AutoBench, AutoRun
from cacheblend_lab.bench.plots import plot_runs
from cacheblend_lab.bench.settings import AutoSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run


def test_every_cell_of_the_grid_is_measured() -> None:
    setting = AutoSetting(
        "tiny",
        tiers=("ram", "disk", "500MB/s"),
        prompts=((1, 8), (2, 40)),
        ratios=(0.05, 0.15, 0.5, 1.0),
        repeats=1,
        profile_s=0.2,
    )
    bench = AutoBench(setting)
    rows = bench.measure()
    assert [(row.tier, row.chunks, row.chunk_tokens) for row in rows] == [
        (tier, *prompt) for tier in setting.tiers for prompt in setting.prompts
    ]
    for row in rows:
        assert row.regret == pytest.approx(row.auto_ttft_s / row.best_ttft_s - 1)
        assert row.choice_regret >= 0
        assert row.choice_regret == 0 or row.auto_choice != row.best_method
        # No setting under the quality floor is compared, and auto chooses none.
        assert row.best_method in ("full", "blend 0.15", "blend 0.5")
        assert row.auto_choice == "full" or float(row.auto_choice.removeprefix("blend ")) >= 0.15
    assert len(bench.runs) == len(rows) * 4
    assert {tier: [cost.tier for cost in profile.loads] for tier, profile in bench.profiles.items()} == {
        "ram": ["ram"],
        "disk": ["ram", "disk"],
        "500MB/s": ["500MB/s"],
    }
    assert all(run.load_s > 0 for run in bench.runs if run.method == "blend")


def runs_of(*prompts: tuple[int, int], tiers: tuple[str, ...] = ("ram", "disk")) -> list[AutoRun]:
    return [
        AutoRun(tier, chunks, tokens, method, ratio, 0.001 * chunks * tokens * ratio, 0.0)
        for tier in tiers
        for chunks, tokens in prompts
        for method, ratio in (("full", 1.0), ("blend", 0.15), ("blend", 0.5), ("auto", 0.2))
    ]


def test_a_figure_that_lacks_runs_is_named(tmp_path: Path) -> None:
    files, lacks = plot_runs(runs_of((1, 64), (2, 64)), tmp_path)
    assert [file.name for file in files] == ["figure15a.png", "figure17.png"]
    assert lacks == ["figure 15b: prompts that differ in the number of tokens of a chunk alone"]
    with pytest.raises(ConfigError, match="no runs"):
        plot_runs([], tmp_path)


def test_the_commands_measure_draw_and_write(tmp_path: Path) -> None:
    measured = tmp_path / "auto.json"
    options = "--shape tiny --tiers ram --prompts 1x8,2x8,2x16 --ratios 0.15,0.5 --repeats 1 --profile-seconds 0.2"
    assert "regret" in run("bench auto", *options.split(), "--json", measured).output
    whole = json.loads(measured.read_text(encoding="utf-8"))
    assert [row["tier"] for row in whole["rows"]] == ["ram"] * 3
    assert len(whole["runs"]) == 12
    plots, figures = tmp_path / "plots", tmp_path / "profile.json"
    store = ("--seconds", 0.5, "--store", tmp_path / "kv")
    run("profile", *store, "--json", figures)
    run("bench figures", plots, *store, "--runs", measured)
    assert {file.stem for file in plots.iterdir()} == {"figure10", "figure15a", "figure15b", "figure17"}
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert {row["kind"] for row in rows} == {"prefill", "blend", "load", "choice"}
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert list((tmp_path / "kv" / "profiles").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench auto --shape tiny --prompts 3", "'3' is not a prompt"),
        ("bench auto --shape tiny --tiers tape", "tier 'tape' is not measured here"),
        ("bench auto --shape tiny --quality-ratio 2", "quality_ratio=2"),
        ("bench figures x --runs pyproject.toml", "holds no runs"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, message: str) -> None:
    assert message in run(arguments, code=2).output
