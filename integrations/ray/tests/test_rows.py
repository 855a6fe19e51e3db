"""Documents as rows."""

from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_ray.rows import Columns, chunks_of, joined, rows_of


def words(text: str) -> int:
    return len(text.split())


def test_files_are_called_by_their_paths_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.md", "deep/b.txt", "c.bin", ".hidden.md"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "blank.md").write_text(" \n")
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe\xff")
    assert [row["document"] for row in rows_of(tmp_path)] == ["a.md", "deep/b.txt"]
    assert rows_of([str(tmp_path / "a.md")]) == [{"document": "a.md", "text": "text of a.md"}]
    assert len(rows_of([tmp_path, tmp_path])) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.md").write_text("another text")
    with pytest.raises(ConfigError, match=r"'a\.md'"):
        rows_of([tmp_path / "a.md", other])


def test_documents_of_both_frameworks() -> None:
    from langchain_core.documents import Document
    from llama_index.core import Document as LlamaDocument

    pages = [Document("one", metadata={"source": "a.pdf", "page": 0}), Document("two", metadata={"source": "a.pdf"})]
    assert rows_of([*pages, Document("three", id="x")]) == [
        {"document": "a.pdf", "text": "one\n\ntwo"},
        {"document": "x", "text": "three"},
    ]
    assert rows_of([LlamaDocument(text="four", id_="y")]) == [{"document": "y", "text": "four"}]


@pytest.mark.parametrize(
    "given", [[{"text": "x"}], [3], [{"document": "a", "text": "x"}, {"document": "a", "text": "y"}]]
)
def test_what_is_no_document_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        rows_of(given)


def test_chunks_have_the_ids_that_the_server_gives() -> None:
    columns = Columns("path", "body", "pieces")
    cut = chunks_of({"path": "d", "body": "one two.\n\nthree four."}, columns, words, 2)
    given = chunks_of({"path": "d", "pieces": ["one two.", "three four."]}, columns, words, 100)
    assert cut == given
    assert [chunk.start for chunk in cut] == [0, 10]


@pytest.mark.parametrize(
    "row",
    [
        {"document": "", "text": "x"},
        {"document": None, "text": "x"},
        {"document": "d"},
        {"document": "d", "text": 3},
        {"document": "d", "text": " \n"},
        {"document": "d", "chunks": []},
        {"document": "d", "chunks": ["x", " "]},
    ],
)
def test_a_row_without_a_document_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        chunks_of(row, Columns(), words, 100)


def test_rows_of_one_document_are_joined_in_their_order() -> None:
    group = {"document": ["d", "d", "d"], "text": ["c", "a", "b"], "n": [3, 1, 2]}
    assert joined(group, Columns(), "n") == {"document": ["d"], "chunks": [["a", "b", "c"]]}
