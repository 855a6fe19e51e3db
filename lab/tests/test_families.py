"""The names that people use, and the shipped table of families."""

from pathlib import Path

import pytest

from cacheblend_lab.family_table import shipped_table, table_lines
from cacheblend_lab.model_names import name_lines, proved
from tests.command import run


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3.1-8b-instruct", "transformers: exact (`llama`"),
        ("Qwen3 Next 80B", "`hybrid`, the state after a head and one document"),
        ("qwen3:8b", "`qwen3_moe`"),
        ("gemma-3-270m-it", "GGUF: serves (Gemma 3 270M, real weights)"),
        ("gpt-oss-20b", "vLLM: serves (`gpt_oss`, tiny random)"),
        ("DeepSeek R1 Distill Qwen 7B", "`qwen2`"),
        ("DeepSeek R1", "vLLM: refused: latent attention"),
        ("DeepSeek V3.2", "choose the tokens that they attend to"),
    ],
)
def test_a_name_as_people_say_it_is_found(name: str, said: str) -> None:
    assert said in (proved(name) or "")


def test_the_command_tells_of_a_name_and_nothing_of_an_id() -> None:
    assert "exact (`mixtral`" in run("models", "Mixtral 8x7B").output
    assert [proved(other) for other in ("mistralai/Mixtral-8x7B", "reference", "unheard-of")] == [None] * 3


def test_the_shipped_tables_are_those_of_the_docs() -> None:
    version, rows = shipped_table()
    docs = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table_lines(rows)) in docs and "\n".join(name_lines()) in docs
    assert f"{sum(row.is_exact for row in rows)} of {len(rows)} families exact with transformers {version}" in docs
