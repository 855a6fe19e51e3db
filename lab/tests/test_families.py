"""``cacheblend-rag families`` and ``cacheblend-rag models``; the names that people use."""

import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_lab.family_table import shipped_table, table_lines
from cacheblend_lab.model_names import name_lines, proved
from tests.command import read_rows, run


@pytest.mark.filterwarnings("ignore")
def test_one_family_is_shown_layer_by_layer(tmp_path: Path) -> None:
    result = run("families", "gemma3_text", "--markdown", str(tmp_path / "model.md"))
    assert result.exit_code == 0
    assert "gemma3_text: exact" in result.output
    assert result.output.count("sliding of 16") == 5
    lines = (tmp_path / "model.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) == 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("families mamba", 0, "mamba: refused: MambaForCausalLM has layers of type linear_attention"),
        ("families lama", 2, "no family 'lama'"),
        ("models reference", 0, "reference: exact"),
    ],
)
def test_what_is_asked_for_is_answered_in_one_line(command: str, code: int, said: str) -> None:
    assert said in run(*command.split(), code=code).output


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


def test_a_name_is_told_without_loading_anything_and_an_id_is_not(tmp_path: Path) -> None:
    result = run("models", "Mixtral 8x7B", "--markdown", tmp_path / "mixtral.md")
    assert result.exit_code == 0 and "Mixtral" in result.output and "GGUF: untried" in result.output
    assert "exact (`mixtral`" in (tmp_path / "mixtral.md").read_text(encoding="utf-8")
    for other in ("mistralai/Mixtral-8x7B", str(tmp_path), "reference", "unheard-of"):
        assert proved(other) is None


def test_the_shipped_table_is_shown_without_running_anything() -> None:
    script = (
        "import sys\nfrom cacheblend_rag.cli.app import app\n"
        "app(['families'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    version, rows = shipped_table()
    assert shown.startswith(
        f"{sum(row.is_exact for row in rows)} of {len(rows)} families exact with transformers {version}"
    )
    assert "deepseek_v3" in shown and "mamba2" in shown


def test_the_shipped_table_is_that_of_the_docs(tmp_path: Path) -> None:
    version, rows = shipped_table()
    docs = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table_lines(rows)) in docs and "\n".join(name_lines()) in docs
    assert f"with transformers {version}" in docs
    run("families", "--markdown", tmp_path / "table.md", "--json", tmp_path / "table.json")
    assert (tmp_path / "table.md").read_text(encoding="utf-8").strip() in docs
    assert [row["family"] for row in read_rows(tmp_path / "table.json")] == [row.family for row in rows]


@pytest.mark.filterwarnings("ignore")
def test_proving_runs_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_lab.families.families", lambda: ["qwen2", "mamba"])
    result = run("families", "--prove")
    assert "1 of 2 families exact" in result.stdout
    assert "families: 0 of 2" in result.stderr and "families: 2 of 2" in result.stderr
