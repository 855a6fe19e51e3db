"""Folders and indexes of other format versions are refused, and left as they are."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreFormatError
from cacheblend_rag.store import check_store
from tests.store.kit import add, files_of, open_store

TO_DO = "remove the (store )?folder and warm it again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path, 0)
    add(store, 1)
    store.close()
    return tmp_path


def test_a_folder_of_version_1(folder: Path) -> None:
    (folder / "store.json").write_text(json.dumps({"format": "cacheblend-rag store", "version": 1}))
    for use in (lambda: open_store(folder, 0), lambda: check_store(folder, repair=True)):
        with pytest.raises(
            StoreFormatError, match=f"format version 1, but this cacheblend-rag reads version 2; {TO_DO}"
        ):
            use()
    assert len(files_of(folder)) == 1


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5])
def test_another_index(folder: Path, version: int) -> None:
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    data = (folder / "index.sqlite").read_bytes()
    with pytest.raises(
        StoreFormatError, match=f"format version {version}, but this cacheblend-rag reads version 4; {TO_DO}"
    ):
        open_store(folder, 0)
    [problem] = check_store(folder).problems
    assert f"format version {version}" in problem
    assert (folder / "index.sqlite").read_bytes() == data
    # What is in the files is not lost for those who cannot compute it again.
    check_store(folder, repair=True)
    assert (check_store(folder).problems, check_store(folder).entries) == ([], 1)
