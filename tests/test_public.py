"""The public names: docs/api.md shows exactly these, and documentation and examples import nothing else."""

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cacheblend_rag", "llama_index_cacheblend", "langchain_cacheblend")
PUBLIC = {name: set(importlib.import_module(name).__all__) for name in PACKAGES}
PUBLIC["cacheblend_rag.errors"] = set(importlib.import_module("cacheblend_rag.errors").__all__)
MODULES = {
    "cacheblend_attachments": set(
        "CompareAnswers Repair SnapKV SourceAttention calibrate calibrate_asking inspector_page".split()
    ),
    "cacheblend_pml": set("Import Module Param Prompt Role Scaffold Schema Schemas Turn Union".split()),
    "cacheblend_rag.selection": {"LayerProbe", "SelectionTask"},
    "cacheblend_serve": {"ServedEngine"},
    "cacheblend_ray": {"WarmSummary", "build_app", "warm"},
    "cacheblend_rag.store.remote": {"ByteSource", "EncodedChunk", "RemoteTier"},
}
PUBLIC |= MODULES
# What examples ask about.
PUBLIC |= {"cacheblend_lab.demo.manual": {"QUESTIONS", "pages"}, "cacheblend_lab.real_model": {"RealModel"}}
PUBLIC["cacheblend_lab.reference"] = {"demo_documents", "demo_questions"}

PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("integrations/*/README.md")]
ROOTS = {name.partition(".")[0] for name in PUBLIC}
API = ROOT / "docs" / "api.md"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_page_shows_exactly_the_public_names(package: str) -> None:
    page = API.read_text(encoding="utf-8")
    shown = re.findall(rf"^::: {package}\.(?:\w+\.)*(\w+)$", page, re.MULTILINE)
    public = PUBLIC[package]
    if package == "cacheblend_rag":
        public = public.union(*(names for module, names in MODULES.items() if module.startswith(package)))
    assert sorted(shown) == sorted(public)


def test_pages_and_examples_import_public_names_only() -> None:
    private = []
    for file, source in [
        *_blocks(),
        *((file, file.read_text(encoding="utf-8")) for file in ROOT.glob("examples/**/*.py")),
        *_cells(),
    ]:
        for module, name in _imports(source):
            if module.partition(".")[0] in ROOTS and name not in PUBLIC.get(module, ()):
                private.append(f"{file.relative_to(ROOT)}: {module}.{name}")
    assert private == []


def _blocks() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for _, block in re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page, textwrap.dedent(block)


def _cells() -> Iterator[tuple[Path, str]]:
    for file in ROOT.glob("examples/**/*.ipynb"):
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code":
                yield file, cell.source


def _imports(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names if "." in alias.name)
