"""CacheBlend's figures on this machine: 10 from a profile, 15a, 15b and 17 from runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from cacheblend_attachments.auto import Profile, Work, choose, layer_compute_s, layer_load_s
from cacheblend_lab.bench.auto import AutoRun
from cacheblend_lab.figures import new_figure, save_figure
from cacheblend_rag.errors import ConfigError

__all__ = ["plot_profile", "plot_runs"]


def plot_profile(profile: Profile, works: Mapping[str, Work], quality_ratio: float, folder: Path) -> Path:
    """Draw Figure 10: seconds of recomputing and of loading one layer of a prompt, against the ratio and by device (`works`)."""
    figure, (left, right) = new_figure(2)
    ratios = [number / 100 for number in range(101)]
    any_work = next(iter(works.values()))
    left.plot(ratios, [1e3 * layer_compute_s(profile, any_work, ratio) for ratio in ratios], "k", label="recompute")
    for number, (name, work) in enumerate(works.items()):
        color, load_s = f"C{number}", layer_load_s(profile, work)[0]
        left.axhline(1e3 * load_s, color=color, linestyle="--", label=f"load from {name}")
        choice = choose(profile, work, quality_ratio)
        if choice.fallback_reason is None:
            left.plot(choice.ratio, 1e3 * layer_compute_s(profile, work, choice.ratio), "o", color=color)
            left.annotate(
                f"{choice.ratio:.2f}",
                (choice.ratio, 1e3 * layer_compute_s(profile, work, choice.ratio)),
                textcoords="offset points",
                xytext=(6, -10),
                color=color,
            )
    left.axvline(quality_ratio, color="0.8", zorder=0)
    left.set(xlabel="recompute ratio", ylabel="ms per layer", title="(a) the ratio, per device", xlim=(0, 1))
    left.set_ylim(bottom=0)
    left.legend(fontsize="small")
    places = range(len(works))
    recompute = [1e3 * layer_compute_s(profile, work, quality_ratio) for work in works.values()]
    load = [1e3 * layer_load_s(profile, work)[0] for work in works.values()]
    right.bar([place - 0.2 for place in places], recompute, 0.4, color="0.4", label=f"recompute {quality_ratio:g}")
    right.bar([place + 0.2 for place in places], load, 0.4, color="C0", label="load")
    right.set_xticks(list(places), list(works))
    right.set(ylabel="ms per layer", title="(b) the device, at the quality floor")
    right.legend(fontsize="small")
    figure.suptitle(f"{any_work.context_tokens} chunk tokens")
    return save_figure(figure, folder / "figure10.png")


def plot_runs(runs: Sequence[AutoRun], folder: Path) -> tuple[list[Path], list[str]]:
    """Draw from measured runs Figures 15a and 15b (TTFT against number and length of chunks) and 17 (against the ratio, per
    device); return the files, and for each figure that cannot be drawn what it lacks.
    """
    if not runs:
        raise ConfigError("there are no runs to draw; measure some with `cacheblend-rag bench auto --json FILE`")
    tier = runs[0].tier
    here = [run for run in runs if run.tier == tier]
    files, lacks = [], []
    number, length = attrgetter("chunks"), attrgetter("chunk_tokens")
    for name, along, fixed, what in (
        ("15a", number, length, "chunks"),
        ("15b", length, number, "tokens of a chunk"),
    ):
        value = _most_varied(here, along, fixed)
        chosen = [run for run in here if fixed(run) == value]
        if len({along(run) for run in chosen}) < 2:
            lacks.append(f"figure {name}: prompts that differ in the number of {what} alone")
            continue
        figure, [axes] = new_figure()
        for label, points in _lines(chosen, along).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        other = "tokens each" if what == "chunks" else "chunks"
        axes.set(xlabel=what, ylabel="TTFT (s)", title=f"{value} {other}, from {tier}")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
        files.append(save_figure(figure, folder / f"figure{name}.png"))
    largest = max((run.chunks * run.chunk_tokens, run.chunks) for run in runs)
    chosen = [run for run in runs if (run.chunks * run.chunk_tokens, run.chunks) == largest]
    if len({run.recompute_ratio for run in chosen if run.method == "blend"}) < 2:
        lacks.append("figure 17: runs at two fixed ratios at least")
    else:
        files.append(_figure17(chosen, folder))
    return files, lacks


def _figure17(runs: Sequence[AutoRun], folder: Path) -> Path:
    figure, [axes] = new_figure()
    for number, tier in enumerate(dict.fromkeys(run.tier for run in runs)):
        here = [run for run in runs if run.tier == tier]
        points = sorted((run.recompute_ratio, run.ttft_s) for run in here if run.method == "blend")
        axes.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=tier)
        for run in here:
            if run.method == "auto":
                axes.plot(
                    run.recompute_ratio, run.ttft_s, "*", color=f"C{number}", markersize=13, label=f"{tier}, auto"
                )
    full = [run.ttft_s for run in runs if run.method == "full"]
    axes.axhline(min(full), color="k", linestyle=":", label="full prefill")
    axes.set(
        xlabel="recompute ratio", ylabel="TTFT (s)", title=f"{runs[0].chunks} chunks of {runs[0].chunk_tokens} tokens"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return save_figure(figure, folder / "figure17.png")


def _most_varied(runs: Sequence[AutoRun], along: Callable[[AutoRun], int], fixed: Callable[[AutoRun], int]) -> int:
    """Return the value of `fixed` at which most values of `along` were measured."""
    return Counter(value for _, value in {(along(run), fixed(run)) for run in runs}).most_common(1)[0][0]


def _lines(runs: Sequence[AutoRun], along: Callable[[AutoRun], int]) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for run in sorted(runs, key=along):
        label = f"blend {run.recompute_ratio:g}" if run.method == "blend" else run.method
        lines.setdefault(label, []).append((along(run), run.ttft_s))
    return lines
