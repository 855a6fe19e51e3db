"""From documents to the chunks that a question is answered from (CacheBlend, section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.splitter import split_text
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.eval.task import EvalContext

__all__ = ["RetrievalSetting", "Retriever", "nearest"]


@dataclass(frozen=True, slots=True)
class RetrievalSetting:
    """How contexts that are no chunks yet are cut and searched.

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
        for name in ("chunk_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class Retriever:
    """Cuts the documents of a context into chunks and finds the nearest to each question.

    Parameters
    ----------
    tokenizer : Any
        The language model's tokenizer, which chunks are measured by.
    setting : RetrievalSetting
        How.
    """

    def __init__(self, tokenizer: Any, setting: RetrievalSetting) -> None:
        self._tokenizer = tokenizer
        self._setting = setting
        self._embedding = Embedding(setting.embedding)

    def cut(self, texts: Sequence[str]) -> list[str]:
        """Return the documents, one behind the other, as chunks of at most `chunk_tokens` tokens, cut at paragraphs as far as
        they fit.
        """
        return split_text("\n\n".join(texts), self.count, self._setting.chunk_tokens)

    def retrieve(self, context: EvalContext) -> tuple[list[str], list[list[int]]]:
        """Return the chunks of a context, and for each question the numbers of those that it is answered from.

        They come nearest first, by the L2 distance of the embeddings. A question without text is answered from the first chunks,
        in their order: there is nothing to be near to.

        Raises
        ------
        ConfigError
            If the embedding model cannot be loaded.
        """
        chunks = self.cut(context.texts)
        first = list(range(min(self._setting.top_k, len(chunks))))
        asked = [question.text for question in context.questions if question.text.strip()]
        if not chunks or not asked:
            return chunks, [first for _ in context.questions]
        vectors = np.asarray(self._embedding.embed([*chunks, *asked]), dtype=np.float64)
        found = iter(nearest(vectors[: len(chunks)], vectors[len(chunks) :], self._setting.top_k))
        return chunks, [next(found) if question.text.strip() else first for question in context.questions]

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""
        # Long texts are meant to be counted here, so no warning that one exceeds the model's window.
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def nearest(chunks: np.ndarray, questions: np.ndarray, top_k: int) -> list[list[int]]:
    """Return for each question the numbers of the nearest chunks, nearest first; of equally near ones the earlier.

    Parameters
    ----------
    chunks, questions : numpy.ndarray
        Embeddings, ``(num_chunks, width)`` and ``(num_questions, width)``.
    top_k : int
        Most chunks of a question.
    """
    distances = np.linalg.norm(questions[:, None, :] - chunks[None, :, :], axis=2)
    return [[int(number) for number in row] for row in distances.argsort(axis=1, kind="stable")[:, :top_k]]
