"""Every family of transformers: exact, or refused with its reason, none in between; and the table in the docs says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from cacheblend_lab.families import families, prove_family
from cacheblend_lab.family_table import table_lines

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"
FAMILIES = families()
# Every eighth, and one of each kind that these leave out.
SAMPLE = {
    *FAMILIES[::8],
    "bloom",
    "codegen",
    "deepseek_v3",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "nanochat",
    "opt",
    "qwen3_next",
    "roberta",
}
# What the models of transformers warn of themselves, on being built or run in an unusual size.
pytestmark = pytest.mark.filterwarnings("ignore")


def documented() -> dict[str, str]:
    """Return the lines of the table in the docs, by family."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def without_figures(line: str) -> str:
    """Return a line without the rounding errors and sizes that some reasons name."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", line)


@pytest.mark.parametrize(
    "family", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES]
)
def test_a_family_is_exact_or_refused_and_the_docs_say_so(family: str) -> None:
    row = prove_family(family)
    assert row.verdict == "exact" or row.verdict.startswith("refused: "), row
    if f"transformers {transformers.__version__}" in DOCS.read_text(encoding="utf-8"):
        [line] = table_lines([row])[2:]
        assert without_figures(documented()[family]) == without_figures(line)


def test_the_docs_have_every_family_and_most_are_exact() -> None:
    rows = documented()
    assert set(rows) == set(FAMILIES)
    exact = sum("| exact |" in line for line in rows.values())
    assert exact >= 120
    assert f"{exact} of {len(rows)} families exact" in DOCS.read_text(encoding="utf-8")
