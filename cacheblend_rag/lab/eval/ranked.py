"""Retrieval as it is in use: a corpus of many documents in Chroma, of whose chunks the nearest to each question are found."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cacheblend_rag.documents import Embedding, open_chroma
from cacheblend_rag.lab.training.corpus import Document, Example, make_example
from cacheblend_rag.lab.training.world import Style

__all__ = ["draw_corpora", "found_chunks"]

# Chroma takes some thousand at once.
_GROUP = 1000


def draw_corpora(
    num_questions: int, seed: int, documents: int, style: Style, min_chunks: int, per_context: int
) -> Iterator[list[Example]]:
    """Yield corpora of at least so many held-out documents, no two about the same subject, until there are enough questions.

    Parameters
    ----------
    num_questions : int
        How many questions all corpora together have; of the last, examples behind these have none.
    seed : int
        The corpora follow from it.
    documents : int
        Least documents of a corpus.
    style : Style
        How rich the examples are that a corpus is made of.
    min_chunks : int
        Least chunks of an example.
    per_context : int
        Most questions about one example.
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

    Chunks are embedded behind the title of their document, as frameworks embed metadata with the text: the sentence "She keeps a
    goose." alone is found for nobody.

    Parameters
    ----------
    documents : sequence of Document
        The corpus.
    questions : sequence of str
        What is asked.
    top_k : int
        Most chunks of a question.
    embedding : Embedding
        What they are compared by.

    Raises
    ------
    ConfigError
        If the embedding model cannot be loaded.
    StoreError
        If Chroma fails.
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
