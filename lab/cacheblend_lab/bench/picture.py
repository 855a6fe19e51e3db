"""Draw figures of `cacheblend_lab.bench.real` for the README: ``python -m cacheblend_lab.bench.picture JSON SVG``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import matplotlib
import typer

matplotlib.use("agg")
# The same figures make the same file.
matplotlib.rcParams["svg.hashsalt"] = "cacheblend"

import matplotlib.pyplot as plt  # noqa: E402  # after its backend is chosen


def main(
    figures: Annotated[Path, typer.Argument(help="What `bench.real` wrote by --json.")],
    picture: Annotated[Path, typer.Argument(help="The SVG file to be made.")],
) -> None:
    """Draw seconds until the first token and the whole answer over the prompt's length: the model alone, and stored KV."""
    found = json.loads(figures.read_text())
    whole = f"answer of {found['setting']['answer_tokens']}"
    drawing, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for what, label, style in (("first token", "first token", "o-"), (whole, f"{whole} tokens", "s--")):
        rows = [row for row in found["rows"] if row["what"] == what]
        lengths = [row["tokens"] for row in rows]
        axes.plot(lengths, [row["alone_s"] for row in rows], style, color="tab:gray", label=f"{label}, full prefill")
        axes.plot(lengths, [row["stored_s"] for row in rows], style, color="tab:blue", label=f"{label}, stored KV")
    axes.set(xlabel="tokens of the prompt", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{found['model']}, two CPU cores", fontsize="medium")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
