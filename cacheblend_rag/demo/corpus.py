"""The demonstration's documents as chunks with ids, and which of them a question is answered from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cacheblend_rag.chunk import text_hash
from cacheblend_rag.reference.corpus import demo_documents

__all__ = ["DemoChunk", "best_documents", "demo_chunks"]

_SLACK = 4


@dataclass(frozen=True, slots=True)
class DemoChunk:
    """One chunk of a document.

    Attributes
    ----------
    id : str
        Holds a digest of the text, so that another corpus never meets this one's chunks under the same names.
    document : int
        The document's number.
    title : str
        The document's title.
    number : int
        The chunk's number in the document.
    start : int
        Where it begins in the document, in characters, its chunks being lines.
    text : str
        What is read.
    """

    id: str
    document: int
    title: str
    number: int
    start: int
    text: str


def demo_chunks(framework: str) -> list[DemoChunk]:
    """Return the chunks of all documents in order, named for a framework's collection."""
    chunks = []
    for number, document in enumerate(demo_documents()):
        start = 0
        for place, text in enumerate(document.chunks):
            id = f"{framework}-{number}-{place}-{text_hash(text)[:8]}"
            chunks.append(DemoChunk(id, number, document.title, place, start, text))
            start += len(text) + 1
    return chunks


def best_documents(ranked: Iterable[int], sizes: Sequence[int], enough: int) -> list[int]:
    """Choose whole documents to answer from.

    A chunk may say only "she", so a document is read as a whole and in order.

    Parameters
    ----------
    ranked : iterable of int
        The document of each chunk that was found, best first.
    sizes : sequence of int
        How many chunks each document has.
    enough : int
        How many chunks to answer from.

    Returns
    -------
    list of int
        Documents in ascending order, best ones first chosen, until they have enough chunks; never more than four beyond that,
        unless the best alone has.
    """
    chosen: list[int] = []
    count = 0
    for document in dict.fromkeys(ranked):
        if chosen and count + sizes[document] > enough + _SLACK:
            continue
        chosen.append(document)
        count += sizes[document]
        if count >= enough:
            break
    return sorted(chosen)
