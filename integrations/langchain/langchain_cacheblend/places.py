"""Places of a vector store's texts: the document that each is a piece of, and where in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag import Chunk
from cacheblend_rag.chunk import document_name, text_hash
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError

__all__ = ["ALONE", "DOCUMENT_KEYS", "DocumentPlaces", "overlap"]

DOCUMENT_KEYS = ("source", "page")
"""Metadata by which loaders say what a text was taken from; without the first a text is of no document."""

logger = logging.getLogger(__name__)

ALONE = "cacheblend_context"
"""Metadata of a text that is to be of no document, whatever store it is added to: ``{"cacheblend_context": "none"}``."""

# A row of a table, as CSVLoader numbers them: those beside it are about something else.
_ROW = "row"
_LEAST_OVERLAP = 16
# Characters of a token, about.
_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """The last piece of a document so far: `start` is None where it is not known."""

    document: str
    id: str
    text: str
    start: int | None


@dataclass(slots=True)
class _Source:
    """State of one source: its last piece, how the text begins that bears its name, and whether it has others."""

    last: _Piece | None = None
    begins: str = ""
    has_several: bool = False


class DocumentPlaces:
    """Makes chunks of a store's texts, which say what document they are a piece of.

    A document is what has the same values of `keys` and of `boundary`, read in the order of ``start_index``, as splitters write
    it with ``add_start_index=True``, or else in the order in which its pieces are added; texts without the first of `keys` stand
    alone. Where ``start_index`` does not rise within a call, another text of that source
    begins, which is a document of its own; it is named after how it begins, so that it is the same one when it is added again.
    `store` is a name of the store: texts of other stores are pieces of other documents.
    """

    def __init__(self, engine: Engine, store: str, keys: Sequence[str], boundary: Sequence[str]) -> None:
        for name, given in (("document_keys", keys), ("boundary", boundary)):
            if isinstance(given, str) or not all(isinstance(key, str) for key in given):
                raise ConfigError(f'{name}={given!r} must be a list of metadata keys, as in {name}=["source"]')
        if engine.config.companions == "similar" and boundary:
            raise ConfigError(
                'boundary says which texts may know of each other, but with companions="similar" the engine reads every chunk '
                'behind any other; give it companions="own"'
            )
        self._engine = engine
        self._store = store
        self._keys = tuple(keys)
        self._boundary = tuple(boundary)
        self._reads = bool(keys) and engine.config.companions != "neutral"
        self._sources: dict[str, _Source] = {}

    @property
    def divides(self) -> frozenset[str] | None:
        """Metadata keys of which no text knows another with another value; None if none knows another, so that all are."""
        if self._engine.config.companions == "similar":
            return frozenset()
        return frozenset((*self._keys, *self._boundary, _ROW)) if self._reads else None

    def copy(self) -> DocumentPlaces:
        """Return one that knows as much, and may learn what this one is not to know."""
        other = copy(self)
        other._sources = {name: replace(source) for name, source in self._sources.items()}
        return other

    def chunks(self, ids: Sequence[str], texts: Sequence[str], metadatas: Sequence[Mapping[str, Any]]) -> list[Chunk]:
        """Return a chunk for each text, none of which is empty; of several with one id for the last."""
        pieces: dict[str, tuple[str, str | None, int | None]] = {}
        made_of = {id: metadata.get(DOCUMENT_KEYS[0]) for id, metadata in zip(ids, metadatas, strict=True)}
        for id, text, metadata in zip(ids, texts, metadatas, strict=True):
            pieces.pop(id, None)
            pieces[id] = (text, self._source(metadata), _start_index(metadata))
        known = dict(zip(pieces, self._engine.places(list(pieces)), strict=True)) if self._reads else {}
        before: dict[str, _Piece] = {}
        chunks = []
        for id, (text, source, start) in pieces.items():
            if source is None:
                chunks.append(Chunk(text, id))
                continue
            last = before.get(source)
            if last is None or (start is not None and last.start is not None and start <= last.start):
                document = self._document(source, known[id], text, start, last is not None)
            else:
                document = last.document
                if start is None and last.start is not None:
                    # Splitters that do not find a piece again say nothing, or -1.
                    start = last.start + len(last.text) - overlap(last.text, text)
            before[source] = _Piece(document, id, text, start)
            chunks.append(Chunk(text, id, document=document, start=start))
        for source, piece in before.items():
            self._sources.setdefault(source, _Source()).last = piece
        return [replace(chunk, source=made_of[str(chunk.id)], indexed=True) for chunk in chunks]

    def owns(self, document: str | None) -> bool:
        """Return whether a document of the engine is one of this store's."""
        return document is not None and document.startswith(f"{json.dumps([self._store])[:-1]}, ")

    def in_reading_order(self, documents: Iterable[Document]) -> list[Document]:
        """Sort the documents of a store, which come in the order in which it got them, by where they stand in their sources.

        A source that has two pieces with one ``start_index`` has several texts; its pieces are left as they are.
        """
        documents = list(documents)
        places: dict[str, dict[int, int]] = {}
        sources = [self._source(document.metadata) for document in documents]
        for number, (document, source) in enumerate(zip(documents, sources, strict=True)):
            start = _start_index(document.metadata)
            if source is not None:
                # Of no place, or the second at one: nothing of this source is moved.
                at = places.setdefault(source, {})
                at[-1 if start is None or start in at else start] = number
        for at in places.values():
            if -1 not in at:
                sorted_pieces = [documents[at[start]] for start in sorted(at)]
                for number, document in zip(sorted(at.values()), sorted_pieces, strict=True):
                    documents[number] = document
        return documents

    def _source(self, metadata: Mapping[str, Any]) -> str | None:
        """Return a name for what a text was taken from, or None for a text that stands alone."""
        if not self._reads or metadata.get(ALONE) == "none":
            return None
        values = {key: metadata[key] for key in self._keys if document_name(metadata.get(key)) is not None}
        if self._keys[0] not in values or metadata.get(_ROW) is not None:
            return None
        values |= {key: metadata.get(key) for key in self._boundary}
        return json.dumps([self._store, values], default=str)

    def _document(self, source: str, known: str | None, text: str, start: int | None, ended: bool) -> str:
        """Return the document that a run of pieces of a source belongs to, by the first of them.

        `known` is the document that this piece is in already; `ended` says that another run of this source came before it in the
        same call.
        """
        if known is not None and (known == source or known.startswith(f"{source}#")):
            return known
        earlier = self._sources.setdefault(source, _Source())
        last, begins = earlier.last, text_hash(text)
        if not ended and last is not None and last.start is not None and start is not None and start > last.start:
            # Sources are added in several calls, by index() for example.
            return last.document
        if begins == earlier.begins or not (ended or earlier.has_several):
            earlier.begins = begins
            return source
        earlier.has_several = True
        return f"{source}#{begins}"


def overlap(before: str, after: str) -> int:
    """Return how many characters at the end of one text stand at the beginning of the other, 16 at least, or 0."""
    sizes = range(min(len(before), len(after)), _LEAST_OVERLAP - 1, -1)
    return next((size for size in sizes if before.endswith(after[:size])), 0)


def _start_index(metadata: Mapping[str, Any]) -> int | None:
    start = metadata.get("start_index")
    return start if isinstance(start, int) and not isinstance(start, bool) and start >= 0 else None
