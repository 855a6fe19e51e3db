"""``cacheblend-rag train-preamble``: what chunks are encoded after is trained on a user's own documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import ModelOption, in_a_folder
from cacheblend_rag.cli.output import progress_bar
from cacheblend_rag.cli.warm import texts_of

__all__ = ["train_preamble"]

_STEPS_A_FILE = 10
"""After so many steps the file is written, so that what ends the command costs no more."""


def train_preamble(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", exists=True, help="Documents, as for warm; a few thousand tokens will do."),
    ],
    model: ModelOption = "reference",
    out: Annotated[
        Path, typer.Option(metavar="FILE", dir_okay=False, callback=in_a_folder, help="The file, .safetensors.")
    ] = Path("preamble.safetensors"),
    steps: Annotated[int, typer.Option(min=1, help="How many prompts to learn from.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts that are drawn.")] = 0,
) -> None:
    """Train what chunks are encoded after, so that the model quotes them as it does by full prefill.

    Needs no questions. The file is a value of the setting preamble, with which chunks are encoded anew; training goes on
    from the preamble that is set.
    """
    from cacheblend_attachments.training import PreambleTrainer

    if out.suffix != ".safetensors":
        raise typer.BadParameter(f"{out} must end in .safetensors", param_hint="--out")
    texts, _ = texts_of(paths)
    with open_engine(model) as engine:
        trainer = PreambleTrainer(engine, list(texts.values()), steps=steps, seed=seed)
        before = trainer.divergence()
        with progress_bar("training") as progress:
            for step in range(1, steps + 1):
                progress(step - 1, steps)
                trainer.step()
                if step % _STEPS_A_FILE == 0 or step == steps:
                    trainer.preamble().write(out)
            progress(steps, steps)
        after = trainer.divergence()
    typer.echo(
        f"divergence from full prefill {before:.4f} nats a token before, {after:.4f} after; the preamble is {out}"
    )
    typer.echo(f"use it: EngineConfig(preamble={str(out)!r}), or CACHEBLEND_PREAMBLE={out}")
