"""Held-out questions over stored documents, for engines of two kinds."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

# Two workers and this process share what cores there are.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several of these processes each have a core.
    _cores = sorted(os.sched_getaffinity(0))
    _own = _cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(_cores)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_own))

from vllm_cacheblend.prefix import StoredPrefix, stored_prefix

from cacheblend_lab.reference.corpus import Question, examples
from cacheblend_lab.reference.prompt import FORM, value_of
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_serve.completions import calls_for
from cacheblend_serve.inprocess import EngineBackend
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import ChatRequest
from tests.engines import documents_of
from tests.limits import wait_until

NUM_QUESTIONS = 24


@dataclass(frozen=True)
class Asked:
    """A question and the prompt that asks it, its chunks in random order."""

    question: Question
    prompt: BlendPrompt


@dataclass(frozen=True)
class Corpus:
    """Documents in a store, questions about them, and the engine that encoded them."""

    engine: BlendEngine
    store: Path
    asked: tuple[Asked, ...]
    chunks: tuple[Chunk, ...]

    def prefix(self, asked: Asked) -> StoredPrefix:
        """Return how vLLM is asked, all of whose context must be stored."""
        prefix = stored_prefix(self.engine, asked.prompt)
        assert prefix.ends == "here the text after the last chunk begins"
        return prefix

    def expected(self, asked: Asked) -> tuple[list[int], torch.Tensor]:
        """Return the tokens that transformers answers with on the same stored KV, and the logits of the first."""
        result = self.engine.generate(asked.prompt, max_new_tokens=48)
        assert all(chunk.hit for chunk in result.report.chunks)
        return list(result.token_ids), torch.as_tensor(self.engine.prefill(asked.prompt).logits).flatten()

    def text_behind(self, asked: Asked) -> tuple[int, ...]:
        """Return the tokens of what a prompt has behind its chunks."""
        return tuple(self.engine.tokenizer(asked.prompt.segments[-1], add_special_tokens=False)["input_ids"])

    @contextmanager
    def without_document_of(self, id: str) -> Iterator[None]:
        """Do without the document that a chunk is of; behind the block it is there again, encoded anew."""
        [document] = documents_of(self.engine, [id])
        assert document is not None
        self.engine.delete_document(document)
        try:
            yield
        finally:
            self.engine.add([chunk for chunk in self.chunks if chunk.document == document])


def is_right(asked: Asked, text: str) -> bool:
    """Return whether an answer's value is the wanted one."""
    return value_of(text) == asked.question.answer


def segments(form: Any, ids: Sequence[str], question: str) -> list[Any]:
    """Return a prompt of chunks by their ids."""
    parts: list[Any] = [form.prefix()]
    for number, id in enumerate(ids):
        parts += [form.separator, ChunkRef(id)] if number else [ChunkRef(id)]
    return [*parts, form.middle + question + form.tail]


def engine_answer(engine: BlendEngine, body: dict[str, Any]) -> Answer:
    """Return what an engine answers to the body of a request for a chat."""

    async def answer() -> Answer:
        [asked] = calls_for(engine, ChatRequest(**body), ServeConfig())
        *_, last = [piece async for piece in EngineBackend(engine).answer(engine, asked)]
        assert isinstance(last, Answer)
        return last

    return asyncio.run(answer())


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def corpus_of(engine: BlendEngine, store: Path, count: int = NUM_QUESTIONS) -> Corpus:
    """Have an engine encode documents, and draw questions about them."""
    rng = random.Random(1)
    asked: list[Asked] = []
    chunks: list[Chunk] = []
    for number, example in enumerate(examples(count)):
        ids: list[str] = []
        for document in example.documents:
            name, start = f"{number}/{document.title}", 0
            for text in document.chunks:
                ids.append(f"{name}/{start}")
                chunks.append(Chunk(text, ids[-1], document=name, start=start))
                start += len(text) + 1
        rng.shuffle(ids)
        asked += [Asked(each, BlendPrompt(segments=segments(FORM, ids, each.text))) for each in example.questions]
    engine.add(chunks)
    return Corpus(engine, store, tuple(asked), tuple(chunks))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    """The corpus of all tests, encoded by transformers."""
    torch.set_num_threads(2)
    store = tmp_path_factory.mktemp("kv")
    config = EngineConfig(separator=FORM.separator, dtype="float32")
    with BlendEngine.from_pretrained("reference", store=store, config=config) as engine:
        yield corpus_of(engine, store)
