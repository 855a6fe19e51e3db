"""The notebooks of ``examples/``, which nbmake runs, are committed with what they show."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
each_notebook = pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_it_is_committed_as_make_notebooks_leaves_it(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert not any("version" in notebook.metadata.language_info or cell.metadata for cell in notebook.cells)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert all(cell.outputs for cell in code_cells(notebook)), "a cell shows nothing"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", ()) for output in outputs)


@each_notebook
def test_it_is_small_and_names_nobodys_folders(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    assert str(ROOT) not in text
    assert re.findall(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|Users)/[\w./-]*", text) == []


@each_notebook
def test_its_links_lead_somewhere(path: Path) -> None:
    written = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", written)
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []
