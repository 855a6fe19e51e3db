"""Count the functions of ours that a query passes before its first token, and an ingestion: ``python -m tests.count_functions``.

Of `cacheblend_rag` and the framework packages, each function counts once, in whatever thread it is called.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from langchain_core.documents import Document as LangChainDocument
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage import StorageContext
from llama_index.core.vector_stores import SimpleVectorStore
from transformers.generation.stopping_criteria import StoppingCriteriaList

import langchain_cacheblend
import llama_index_cacheblend
from cacheblend_rag import BlendEngine

OURS = ("cacheblend_rag", "llama_index_cacheblend", "langchain_cacheblend")
TEXTS = [
    "Mara Lindell was born in Oslo. ",
    "She works as a baker in the old town. ",
    "Otto Brandt was born in Lisbon. ",
    "He paints ships for the harbour office. ",
    "The harbour office stands beside the bakery. ",
]
STARTS = [sum(map(len, TEXTS[:number])) for number in range(len(TEXTS))]
QUESTION = "Where was Mara Lindell born?"


@contextmanager
def counting() -> Iterator[set[str]]:
    """Note the functions of ours that are called in this block, by module and name, until a first token is there."""
    found: dict[CodeType, str] = {}
    begun = threading.Event()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event != "call" or begun.is_set() or frame.f_code in found:
            return
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if code is StoppingCriteriaList.__call__.__code__:
            begun.set()
        # A comprehension is part of the function that it stands in; a dataclass's own methods have no file.
        elif module.partition(".")[0] in OURS and "<" not in code.co_name and code.co_filename[:1] != "<":
            found[code] = f"{module}.{getattr(code, 'co_qualname', code.co_name)}"

    names: set[str] = set()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        names.update(found.values())


def count(ingest: Callable[[], Any], query: Callable[[], Callable[[], Any]]) -> tuple[set[str], set[str]]:
    """Count an ingestion, and the query over what was ingested when it is asked for the third time."""
    with counting() as ingestion:
        ingest()
    ask = query()
    for _ in range(2):
        ask()
    with counting() as names:
        ask()
    return ingestion, names


def with_llama_index(engine: BlendEngine) -> tuple[set[str], set[str]]:
    """Count in LlamaIndex: a `VectorStoreIndex` and its query engine."""
    llm = llama_index_cacheblend.BlendLLM(engine=engine, max_new_tokens=4)
    embedding = MockEmbedding(8)
    store = llama_index_cacheblend.BlendVectorStore(SimpleVectorStore(), engine=llm)
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="a document")}
    nodes = [
        TextNode(id_=f"n{n}", text=text, start_char_idx=start, relationships=source, embedding=[1.0 * n] + [0.5] * 7)
        for n, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True))
    ]
    made: list[VectorStoreIndex] = []

    def ingest() -> None:
        storage = StorageContext.from_defaults(vector_store=store)
        made.append(VectorStoreIndex(nodes, storage_context=storage, embed_model=embedding, store_nodes_override=True))

    def query() -> Callable[[], Any]:
        llama_index_cacheblend.install()
        asked = made[0].as_query_engine(llm=llm, response_mode="blend", similarity_top_k=3)
        return lambda: asked.query(QUESTION)

    return count(ingest, query)


def with_langchain(engine: BlendEngine) -> tuple[set[str], set[str]]:
    """Count in LangChain: a chain of a retriever, a prompt and a model."""
    llm = langchain_cacheblend.ChatBlend(engine=engine, max_tokens=4)
    store = langchain_cacheblend.BlendVectorStore(
        InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), engine=engine
    )
    documents = [
        LangChainDocument(text, id=f"d{number}", metadata={"source": "a document", "start_index": start})
        for number, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True))
    ]

    def query() -> Callable[[], Any]:
        prompt = ChatPromptTemplate.from_template("Answer from the context.\n\n{context}\n\nQuestion: {question}")
        retriever = store.as_retriever(search_kwargs={"k": 3})
        context = retriever | (lambda found: "\n\n".join(each.page_content for each in found))
        chain = {"context": context, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()
        return lambda: chain.invoke(QUESTION)

    return count(lambda: store.add_documents(documents), query)


def functions() -> dict[str, set[str]]:
    """Return what is passed in each framework, by what is done there."""
    found = {}
    for framework, run in (("LlamaIndex", with_llama_index), ("LangChain", with_langchain)):
        with BlendEngine.from_pretrained("reference") as reference:
            found[f"{framework}, an ingestion"], found[f"{framework}, a warm query"] = run(reference)
    return found


if __name__ == "__main__":
    for what, names in functions().items():
        core = sum(name.startswith(f"{OURS[0]}.") for name in names)
        print(f"{what}: {len(names)} functions, {core} of the core and {len(names) - core} of the package")
        print(*(f"    {name}" for name in sorted(names)), sep="\n")
