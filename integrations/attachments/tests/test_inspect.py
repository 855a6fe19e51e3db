"""``inspect``: a page in a file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.conftest import documents as documents
from tests.cli.conftest import model_folder as model_folder
from tests.cli.conftest import run as run


@pytest.fixture
def store(run: Command, documents: Path, model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    run("warm", documents, "--store", folder, "--model", model_folder, "--chunk-tokens", "40")
    return folder


def data_of(file: Path) -> dict[str, Any]:
    page = file.read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_is_written_in_place(run: Command, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--store", store, "--top-k", "3", "--max-new-tokens", "5"]
    said = run("inspect", "Where was Mara born?", *options).stdout
    assert "inspect.html" in said
    data = data_of(tmp_path / "inspect.html")
    [view] = data["views"]
    assert len(view["chunks"]) == 3
    assert view["figures"]["hits"] == 3
    assert any(chunk["behind"] for chunk in view["chunks"])
    assert all(chunk["document"] is not None for chunk in view["chunks"])
    assert view["chunks"][0]["attention"] is None
    assert "Where was Mara born?" in "".join(data["tokens"])


def test_inspect_shows_full_prefill_and_attention_where_asked(run: Command, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    options = ["--store", store, "--top-k", "3", "--max-new-tokens", "5", "--html", file]
    run("inspect", "Where was Mara born?", *options, "--full", "--attention")
    views = data_of(file)["views"]
    assert [view["full"] for view in views] == [False, True]
    assert all(chunk["attention"] is not None for view in views for chunk in view["chunks"])


def test_a_page_that_cannot_be_written_is_said_at_once(run: Command, store: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "page.html"
    assert "does not exist" in run("inspect", "Where?", "--store", store, "--html", missing, code=2).stderr
    assert run("inspect", "  ", "--store", store, code=2).stderr
