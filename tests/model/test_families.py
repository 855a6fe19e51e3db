"""Every family of transformers: exact, or refused with its reason, none in between, as the shipped table says."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from cacheblend_lab.families import families, prove, prove_family, tiny_config, tiny_model, with_outliers
from cacheblend_lab.families.capability import capability
from cacheblend_lab.family_table import SHIPPED, FamilyRow, shipped_table, table_lines
from cacheblend_lab.model_names import name_lines
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse.selfcheck import check_blending
from cacheblend_rag.model import inspect_model

DOCS = Path(__file__).resolve().parents[2] / "docs" / "models.md"
FAMILIES = families()
VERSION, ROWS = shipped_table()
SHOWN = {row.family: row for row in ROWS}
# Every sixteenth, and one of each kind that these leave out.
SAMPLED = "bloom codegen deepseek_v3 gemma3n_text gemma4_text gpt2 gpt_oss llama4_text nanochat opt qwen3_next roberta"
SAMPLE = {*FAMILIES[::16], *SAMPLED.split()}
# What the models of transformers warn of themselves, on being built or run in an unusual size.
pytestmark = pytest.mark.filterwarnings("ignore")


def without_figures(row: FamilyRow) -> str:
    """Return a row without the rounding errors and sizes that some reasons name."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", str(row))


@pytest.fixture(scope="module")
def proved() -> Iterator[list[FamilyRow]]:
    """The families that were run; with WRITE_FAMILIES=1 and all of them, they become the table, here and in the docs."""
    rows: list[FamilyRow] = []
    yield rows
    if os.environ.get("WRITE_FAMILIES") and len(rows) == len(FAMILIES):
        lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
        version = transformers.__version__
        SHIPPED.write_text(f'{{"transformers": "{version}", "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        text = with_table(with_table(DOCS.read_text(encoding="utf-8"), table_lines(rows)), name_lines())
        exact = f"{sum(row.is_exact for row in rows)} of {len(rows)} families exact with transformers {version}"
        text = re.sub(r"\d+ of \d+ families exact with transformers [\d.]+\d", exact, text)
        DOCS.write_text(text, encoding="utf-8")


def with_table(text: str, lines: Sequence[str]) -> str:
    """Return a page with a table in the place of the one that has the same head."""
    before, head, after = text.partition(lines[0] + "\n")
    return before + head + "\n".join(lines[1:]) + "\n" + re.sub(r"\A(\|.*\n)*", "", after)


@pytest.mark.parametrize(
    "family", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES]
)
def test_a_family_is_exact_or_refused_and_the_table_says_so(family: str, proved: list[FamilyRow]) -> None:
    row = prove_family(family)
    proved.append(row)
    assert row.verdict == "exact" or row.verdict.startswith("refused: "), row
    if transformers.__version__ == VERSION and not os.environ.get("WRITE_FAMILIES"):
        assert without_figures(row) == without_figures(SHOWN[family])


def test_the_table_has_every_family_and_most_are_exact() -> None:
    assert set(SHOWN) == set(FAMILIES)
    assert sum(row.is_exact for row in ROWS) >= 120


def test_each_layer_says_what_it_attends_with_and_where_its_positions_are() -> None:
    def layers(family: str, **changes: Any) -> Sequence[Any]:
        seen = capability(tiny_model(tiny_config(family, **changes)))
        assert (seen.reason is None) == (family != "qwen3_next")
        return seen.layers

    turned, plain = layers("smollm3", no_rope_layers=[1, 1, 1, 0, 1, 1])[2:4]
    assert "8 dimensions" in turned.positions and "turned" in turned.blending
    assert "none" in plain.positions and "turned" not in plain.blending
    sliding, full = layers("gpt_oss")[:2]
    assert "16" in sliding.attention and "16" not in full.attention
    assert all("sinks" in layer.attention and "yarn" in layer.positions for layer in (sliding, full))
    assert "values turned" in layers("deepseek_v3")[0].blending
    assert ["earlier layer" in layer.blending for layer in layers("gemma3n_text")] == [False] * 4 + [True] * 2
    assert all("position of encoding" in layer.blending for layer in layers("gpt2"))
    assert all("in full" in layer.blending for layer in layers("qwen3_next"))


EXACT = ("qwen2_5_vl", "qwen3_vl", "llava", "mistral3")
MORE = (
    "aria aya_vision cohere2_vision gemma3 idefics2 idefics3 internvl llama4 llava_next llava_onevision "
    "ovis2 qwen2_vl qwen3_vl_moe smolvlm video_llama_3"
).split()


@pytest.mark.parametrize("family", [*EXACT, *(pytest.param(family, marks=pytest.mark.full) for family in MORE)])
def test_a_vision_language_model_blends_text(family: str) -> None:
    proof = prove(tiny_model(tiny_config(family), kind=AutoModelForImageTextToText))
    assert proof.is_exact, proof


def test_one_that_lets_text_see_what_follows_is_refused() -> None:
    proof = prove(tiny_model(tiny_config("paligemma"), kind=AutoModelForImageTextToText))
    assert proof.refused is not None and not proof.failed


HALVES = [torch.bfloat16, torch.float16]
HALF_SAMPLE = set(zip("qwen2 llama deepseek_v3 bloom gpt_neo".split(), [*HALVES, *HALVES, HALVES[0]], strict=True))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype) if (family, dtype) in HALF_SAMPLE else pytest.param(family, dtype, marks=pytest.mark.full)
        for family in FAMILIES
        for dtype in HALVES
    ],
)
def test_in_half_precision_what_is_exact_is_taken_and_what_is_not_is_refused(family: str, dtype: torch.dtype) -> None:
    try:
        model = tiny_model(tiny_config(family))
    except Exception:
        pytest.skip("transformers builds no small language model from its configuration")
    if not SHOWN[family].is_exact:
        with pytest.raises(UnsupportedModelError):
            check_blending(inspect_model(model.to(dtype)))
        return
    check_blending(inspect_model(tiny_model(tiny_config(family), dtype=dtype)))
    check_blending(inspect_model(with_outliers(model).to(dtype)))


# Logits of rows that are computed apart: on a CPU the same to the last bit, elsewhere a rounding or two of one part in 256.
LOGITS_TOLERANCE = 0.01
IN_BFLOAT16 = "llama gemma3_text deepseek_v3 qwen2 qwen3 mistral gemma2 phi3 olmo2 gpt_neox".split()


@pytest.mark.parametrize(
    "family", [*IN_BFLOAT16[:3], *(pytest.param(each, marks=pytest.mark.full) for each in IN_BFLOAT16[3:])]
)
def test_blending_in_bfloat16(family: str) -> None:
    proof = prove(tiny_model(tiny_config(family), dtype=torch.bfloat16))
    assert proof.refused is None
    differences = dict(proof.differences)
    assert max(differences[name] for name in ("oracle", "ratio 1.0", "hits and misses")) <= LOGITS_TOLERANCE
    assert differences["greedy answer"] == 0
