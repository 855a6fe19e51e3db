"""The notebooks of ``examples/`` run from a fresh kernel without a word on stderr, and are committed with what they show."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.notebooks import FOLDER, METADATA, NOTEBOOKS, executed

ROOT = FOLDER.parent
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: NotebookNode) -> dict[str, list[list[str]]]:
    """By the cell's id, what kinds of output it has."""
    return {
        cell.id: [
            [output.output_type, output.get("name", ""), *sorted(output.get("data", ()))] for output in cell.outputs
        ]
        for cell in code_cells(notebook)
    }


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if "quick_start" in path.stem else pytest.mark.full)
        for path in NOTEBOOKS
    ],
)
def test_it_runs_and_shows_what_was_committed(path: Path) -> None:
    notebook = executed(path)
    said = [output.text for cell in code_cells(notebook) for output in cell.outputs if output.get("name") == "stderr"]
    assert said == []
    assert shown(notebook) == shown(read(path)), "run `make notebooks` and commit the outputs"


@each_notebook
def test_it_is_committed_as_make_notebooks_leaves_it(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert all(outputs for outputs in shown(notebook).values()), "a cell shows nothing"
    assert not any({output[0], output[1]} & {"error", "stderr"} for each in shown(notebook).values() for output in each)
    assert any("image/png" in output for each in shown(notebook).values() for output in each)


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
