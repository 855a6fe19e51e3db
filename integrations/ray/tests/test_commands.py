"""The two commands of docs/cluster.md, as they are written there, and both frameworks asking what they have started."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

import llama_index_cacheblend
from cacheblend_rag import BlendEngine
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, split_text
from cacheblend_ray.rows import rows_of
from cacheblend_serve import ServedEngine
from integrations.llama_index.tests.conftest import WordEmbedding
from integrations.ray.tests.conftest import VARIABLES
from langchain_cacheblend import ChatBlend
from tests.store.remote.conftest import needs_redis, wait_for_port

PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"
ADDRESS = "http://127.0.0.1:8000"
DOCUMENTS, QUESTIONS = 500, 12
PLACES = "harbour mill tower bridge market garden station library foundry quarry".split()
PROMPT = ChatPromptTemplate.from_template("Answer from the context only.\n\n{context}\n\nQuestion: {question}")


def commands() -> list[str]:
    """Return the lines of the first two blocks of code of the page, after what installs the package."""
    first, second = PAGE.read_text(encoding="utf-8").split("```")[1:5:2]
    lines = (first + second).replace("Qwen/Qwen2.5-0.5B-Instruct", "reference").splitlines()
    return [line for line in lines if line and not line.startswith("pip ")]


def write_documents(folder: Path) -> None:
    rng = random.Random(5)
    for number in range(DOCUMENTS):
        place = rng.choice(PLACES)
        parts = [
            f"Person {number} was born in {rng.randrange(1800, 2000)}.",
            f"They keep the {place} of district {number}, and open it at {rng.randrange(5, 11)}.",
        ]
        path = folder / f"district-{number % 20}" / f"person-{number}.md"
        path.parent.mkdir(exist_ok=True)
        # Paragraphs that are chunks, all of which have room in the page's Redis.
        path.write_text("\n\n".join(f"{part} {'Nothing else is known. ' * 30}" for part in parts), encoding="utf-8")


def chunks_of(folder: Path, engine: BlendEngine) -> list[Chunk]:

    def count(text: str) -> int:
        return len(engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    cut = ((row["document"], split_text(row["text"], count, 256)) for row in rows_of(folder))
    return [each.chunk for name, pieces in cut for each in named_passages(name, pieces)]


@contextmanager
def started(command: str, environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a folder until it is interrupted."""
    process = subprocess.Popen(shlex.split(command), env=environment, cwd=folder)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the page has done before its two commands: two servers of Redis, and the environment that names them."""
    needs_redis()
    (tmp_path / "docs").mkdir()
    # Of its own, so that what runs beside it is not asked.
    environment = (
        os.environ | VARIABLES | {"RAY_ADDRESS": "local", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    )
    # What was rounded on its way would be another answer where two tokens are nearly as likely.
    environment["CACHEBLEND_DISK_CODEC"] = "native"
    begun = []
    try:
        for line in commands():
            if line.startswith("redis-server"):
                command = shlex.split(line.replace("--daemonize yes", f"--dir {tmp_path}"))
                begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
                wait_for_port(int(command[command.index("--port") + 1]), begun[-1])
            elif line.startswith("export"):
                environment |= dict(setting.split("=", 1) for setting in shlex.split(line)[1:])
        yield environment
    finally:
        for process in begun:
            process.terminate()
            process.wait()


def wait_for_server(process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None
        try:
            if httpx.get(f"{ADDRESS}/readyz", timeout=60).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_both_frameworks_ask(machine: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "docs")
    warm, serve = commands()[-2:]
    subprocess.run(shlex.split(warm), env=machine, cwd=tmp_path, check=True)
    first = capfd.readouterr().out
    subprocess.run(shlex.split(warm), env=machine, cwd=tmp_path, check=True)
    again = capfd.readouterr().out
    with capfd.disabled():
        print(f"\n{first}{again}", end="")
    with started(serve, machine, tmp_path) as process, BlendEngine.from_pretrained("reference") as one:
        chunks = chunks_of(tmp_path / "docs", one)
        assert f"{len(chunks)} chunks of {DOCUMENTS} documents: {len(chunks)} encoded, 0 there already" in first
        assert f"0 encoded, {len(chunks)} there already" in again
        one.add(chunks)
        wait_for_server(process)
        with ServedEngine(ADDRESS) as served:
            assert sorted(served.ids()) == sorted(each.id for each in chunks)
        rng = random.Random(1)
        for _ in range(QUESTIONS):
            number = rng.randrange(DOCUMENTS)
            question = f"When does person {number} open the {rng.choice(PLACES)}?"
            name = f"district-{number % 20}/person-{number}.md"
            found = [each for each in chunks if each.document == name]
            found += rng.sample([each for each in chunks if each.document != name], 2)
            _ask_llama_index(one, found, question)
            _ask_langchain(one, found, question)


def _ask_llama_index(one: BlendEngine, found: list[Chunk], question: str) -> None:
    llama_index_cacheblend.install()
    nodes = [TextNode(id_=each.id, text=each.text) for each in found]
    index = VectorStoreIndex(nodes, embed_model=WordEmbedding(model_name="words"))
    here = llama_index_cacheblend.BlendLLM(engine=one, max_new_tokens=12)
    there = llama_index_cacheblend.BlendLLM(server=ADDRESS, max_new_tokens=12)
    expected, answer = (
        index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=4).query(question)
        for llm in (here, there)
    )
    assert str(answer) == str(expected) != ""
    assert answer.metadata["blend"]["hits"] == len(found)


def _ask_langchain(one: BlendEngine, found: list[Chunk], question: str) -> None:
    context = "\n\n".join(Document(each.text, id=each.id).page_content for each in found)
    asked = PROMPT.invoke({"context": context, "question": question})
    expected, answer = (
        llm.invoke(asked) for llm in (ChatBlend(engine=one, max_tokens=12), ChatBlend(server=ADDRESS, max_tokens=12))
    )
    assert answer.content == expected.content != ""
    assert answer.response_metadata["blend"]["hits"] == len(found)
