"""What people copy runs as it is written: the example and the README's starter script, on real MiniLM and Chroma."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag.reference.corpus import demo_documents, demo_questions

from .conftest import WordEmbedding

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", ROOT / "integrations" / "llama_index" / "README.md"]
EXAMPLE = ROOT / "examples" / "llama_index_query_engine.py"


def test_the_example_runs_and_every_chunk_hits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    hits = re.findall(r"^  (\d+) of (\d+) chunks hit", done.stdout, re.MULTILINE)
    assert len(hits) == 4
    assert all(hit == total == "12" for hit, total in hits)


@pytest.mark.parametrize("readme", READMES, ids=["project", "package"])
def test_the_starter_script_of_the_readme(readme: Path, chroma: ChromaVectorStore, embedding: WordEmbedding) -> None:
    diffs = re.findall(r"```diff\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    (diff,) = [diff for diff in diffs if "llama_index_cacheblend" in diff]
    lines = diff.splitlines()
    added, removed = ([line[1:] for line in lines if line.startswith(sign)] for sign in "+-")
    # What is taken out is put back changed: the model, and one argument of the query engine.
    assert len(removed) == 2
    assert len(added) - len(removed) == 3
    before, after = removed[1], next(line for line in added if line.startswith("query_engine"))
    assert after == before.replace("llm=llm)", 'llm=llm, response_mode="blend")')
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    script = script.replace("Qwen/Qwen2.5-7B-Instruct", "reference")
    names: dict[str, Any] = {
        "ChromaVectorStore": ChromaVectorStore,
        "StorageContext": StorageContext,
        "VectorStoreIndex": VectorStoreIndex,
        "collection": chroma._collection,
        "documents": [Document(text="\n".join(document.chunks)) for document in demo_documents()[:3]],
    }
    settings = Settings._embed_model
    Settings.embed_model = embedding
    try:
        exec(compile(script, str(readme), "exec"), names)
    finally:
        Settings._embed_model = settings
    response = names["query_engine"].query(demo_questions()[0].text)
    assert response.response
    assert response.metadata["blend"]["hits"] == len(response.source_nodes) > 0
    names["llm"].engine.close()
