"""Retrieval of the chunks of documents that a question is answered from.

They are those of one context (CacheBlend, section 7.1), or of a corpus in Chroma: retrieval as it is in use.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend_lab.eval.task import EvalContext, at_least_one
from cacheblend_lab.training.corpus import Document, Example, make_example
from cacheblend_lab.training.questions import ContextStyle
from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.library import open_chroma
from cacheblend_rag.documents.splitter import split_text

__all__ = ["RetrievalSetting", "Retriever", "draw_corpora", "found_chunks", "nearest"]


@dataclass(frozen=True, slots=True)
class RetrievalSetting:
    """Settings of how contexts that are not chunks yet are cut and searched.

    Attributes
    ----------
    chunk_tokens : int
        Most tokens of a chunk.
    top_k : int
        How many chunks a question is answered from.
    embedding : str, optional
        The sentence-transformers model, hub id or folder, that chunks and questions are compared by; by default
        all-MiniLM-L6-v2.
    """

    chunk_tokens: int = 512
    top_k: int = 6
    embedding: str | None = None

    def __post_init__(self) -> None:
        at_least_one(chunk_tokens=self.chunk_tokens, top_k=self.top_k)


class Retriever:
    """Cuts the documents of a context into chunks and finds the nearest to each question."""

    def __init__(self, tokenizer: Any, setting: RetrievalSetting) -> None:
        self._tokenizer = tokenizer
        self._setting = setting
        self._embedding = Embedding(setting.embedding)

    def cut(self, text: str) -> list[str]:
        """Return a document as chunks of at most `chunk_tokens` tokens, cut at paragraphs as far as they fit."""
        return split_text(text, self.count, self._setting.chunk_tokens)

    def retrieve(self, context: EvalContext) -> tuple[list[str], list[int], list[list[int]]]:
        """Return the chunks of a context, how many each of its documents has, and for each question the numbers of those that it
        is answered from.

        These come nearest first, by the L2 distance of the embeddings. A question without text is answered from the first chunks,
        in their order: there is nothing to be near to.
        """
        cut = [self.cut(text) for text in context.texts]
        chunks, lengths = [chunk for document in cut for chunk in document], [len(document) for document in cut]
        first = list(range(min(self._setting.top_k, len(chunks))))
        asked = [question.text for question in context.questions if question.text.strip()]
        if not chunks or not asked:
            return chunks, lengths, [first for _ in context.questions]
        vectors = np.asarray(self._embedding.embed([*chunks, *asked]), dtype=np.float64)
        found = iter(nearest(vectors[: len(chunks)], vectors[len(chunks) :], self._setting.top_k))
        return chunks, lengths, [next(found) if question.text.strip() else first for question in context.questions]

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        # Long texts are meant to be counted here, so no warning that one exceeds the model's window.
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def nearest(chunks: np.ndarray, questions: np.ndarray, top_k: int) -> list[list[int]]:
    """Return for each question the numbers of the nearest chunks, nearest first; of equally near ones the earlier."""
    distances = np.linalg.norm(questions[:, None, :] - chunks[None, :, :], axis=2)
    return [[int(number) for number in row] for row in distances.argsort(axis=1, kind="stable")[:, :top_k]]


# Chroma takes some thousand at once.
_GROUP = 1000


def draw_corpora(
    num_questions: int, seed: int, documents: int, style: ContextStyle, min_chunks: int, per_context: int
) -> Iterator[list[Example]]:
    """Yield corpora of at least `documents` held-out documents, no two about the same subject, until there are enough questions.

    Of the last corpus, examples after these have none.
    """
    rng = random.Random(f"corpora:{seed}")
    missing = num_questions
    while missing > 0:
        corpus: list[Example] = []
        titles: set[str] = set()
        while len(titles) < documents:
            example = make_example(rng, style, "held_out", per_context)
            own = {document.title for document in example.documents}
            if len(example.chunks) < min_chunks or own & titles:
                continue
            titles |= own
            questions = example.questions[:missing]
            missing -= len(questions)
            corpus.append(Example(example.chunks, questions, example.documents))
        yield corpus


def found_chunks(
    documents: Sequence[Document], questions: Sequence[str], top_k: int, embedding: Embedding
) -> list[list[tuple[int, int]]]:
    """Return for each question the nearest chunks of all documents, nearest first, as numbers of document and chunk.

    Chunks are embedded after the title of their document, as frameworks embed metadata with the text: the sentence "She keeps a
    goose." alone is found by no name.
    """
    places = [(number, chunk) for number, document in enumerate(documents) for chunk in range(len(document.chunks))]
    texts = [f"{documents[number].title}\n{documents[number].chunks[chunk]}" for number, chunk in places]
    with tempfile.TemporaryDirectory() as name, open_chroma(Path(name)) as client:
        passages = client.create_collection(
            "passages", embedding_function=None, configuration={"hnsw": {"space": "cosine", "ef_search": len(texts)}}
        )
        for start in range(0, len(texts), _GROUP):
            group = texts[start : start + _GROUP]
            vectors = embedding.embed(group)
            # A list of lists is taken as well.
            passages.add([str(start + n) for n in range(len(group))], vectors, documents=group)  # type: ignore[arg-type]
        found = passages.query(
            query_embeddings=embedding.embed(questions),  # type: ignore[arg-type]
            n_results=min(top_k, len(texts)),
            include=[],
        )
    return [[places[int(number)] for number in row] for row in found["ids"]]
