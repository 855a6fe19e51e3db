"""``cacheblend-rag bench``: speed."""

from __future__ import annotations

import typer

from cacheblend_rag.lab.cli.bench_auto import auto
from cacheblend_rag.lab.cli.bench_batch import batch
from cacheblend_rag.lab.cli.bench_codecs import codecs
from cacheblend_rag.lab.cli.bench_encode import encode
from cacheblend_rag.lab.cli.bench_figures import figures
from cacheblend_rag.lab.cli.bench_find import find
from cacheblend_rag.lab.cli.bench_index import index
from cacheblend_rag.lab.cli.bench_load import load
from cacheblend_rag.lab.cli.bench_pml import pml
from cacheblend_rag.lab.cli.bench_prefetch import prefetch
from cacheblend_rag.lab.cli.bench_tpot import tpot
from cacheblend_rag.lab.cli.bench_ttft import ttft

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed: on random weights at the shapes of real models, of the store's index, and of LangChain calls.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (ttft, tpot, pml, load, prefetch, encode, codecs, index, batch, find, auto, figures):
    bench_app.command()(command)
