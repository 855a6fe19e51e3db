"""Passages in Chroma, and their KV in the engine's store, kept in step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.folder import PASSAGES, alone_in, chroma_of, open_chroma
from cacheblend_rag.documents.splitter import Passage
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from chromadb import Collection

__all__ = ["Library", "Match", "WarmResult", "passage_chunk", "reading_order"]

# Passages encoded, embedded and shown together; what a killed run has to do again at most.
_GROUP = 64
_DELETE_GROUP = 1000
# A chunk's file holds some words about each layer beside the KV itself.
_FILE_BYTES_PER_LAYER = 512

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What `Library.warm` did.

    Attributes
    ----------
    encoded, unchanged, removed : int
        Passages whose KV was computed, was there already, and was deleted with them.
    left_out : int
        Passages that did not fit the budget any more.
    tokens : int
        Tokens encoded.
    kv_bytes : int
        Bytes of KV in the store now.
    """

    encoded: int
    unchanged: int
    removed: int
    left_out: int
    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """A passage that was found, and its cosine distance from the question."""

    passage: Passage
    distance: float


class Library:
    """Passages in Chroma and their KV in the engine's store; a context manager.

    KV is written before its passage is shown in Chroma, and removed after it: whatever Chroma finds has been encoded. What a
    killed run leaves is KV without a passage, which the next `warm` finds by comparing the names on both sides.

    Parameters
    ----------
    folder : Path
        Holds the folder ``chroma``, made if there is none; the engine's store is the folder ``kv`` beside it.
    engine : BlendEngine
        Encodes.
    embedding : Embedding
        What passages are found by.

    Attributes
    ----------
    embedding : Embedding
        The same.

    Raises
    ------
    ConfigError
        If the folder was filled with another embedding model.
    """

    def __init__(self, folder: Path, engine: BlendEngine, embedding: Embedding) -> None:
        self._folder = folder
        self._engine = engine
        self.embedding = embedding
        self._client = open_chroma(folder)
        self._passages = self._open()

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close Chroma; the engine stays open."""
        self._client.close()

    def __len__(self) -> int:
        return self._passages.count()

    def warm(
        self,
        passages: Sequence[Passage],
        roots: Sequence[Path],
        *,
        budget_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmResult:
        """Make the library hold exactly `passages` of all files at and below `roots`; other files' passages stay.

        Parameters
        ----------
        passages : sequence of Passage
            All passages of those files.
        roots : sequence of Path
            The files and folders that were read.
        budget_bytes : int, optional
            Most bytes of KV in the store; the passages from the first on that would exceed it are left out.
        progress : callable, optional
            Called with the number of finished passages and of all.

        Returns
        -------
        WarmResult
            What was done.

        Raises
        ------
        ConfigError
            If another process is warming this library.
        StoreError
            If KV cannot be stored; what was warmed until then stays.
        """
        with alone_in(self._folder), chroma_of(self._folder):
            shown = self._shown()
            wanted = {passage.id for passage in passages}
            removed = self._remove(shown, wanted, [str(root.resolve()) for root in roots])
            done = encoded = tokens = 0
            report = progress or (lambda done, total: None)
            for group in _groups(passages, _GROUP):
                fitting = self._fitting(group, budget_bytes)
                finished = done
                added = self._engine.add(
                    [passage_chunk(passage) for passage in fitting],
                    progress=lambda count, _, before=finished: report(before + count, len(passages)),  # type: ignore[misc]
                )
                encoded, tokens, done = encoded + added.encoded, tokens + added.tokens, done + len(fitting)
                self._show(fitting, shown)
                if len(fitting) < len(group):
                    break
            kv_bytes = self._engine.store.stats().disk_bytes
            return WarmResult(encoded, done - encoded, removed, len(passages) - done, tokens, kv_bytes)

    def search(self, question: str, top_k: int) -> list[Match]:
        """Return the `top_k` passages nearest to the question, nearest first."""
        vectors = self.embedding.embed([question])
        with chroma_of(self._folder):
            found = self._passages.query(
                query_embeddings=vectors,  # type: ignore[arg-type]  # a list of lists is taken as well
                n_results=top_k,
                include=["documents", "metadatas", "distances"],
            )
        assert found["documents"] and found["metadatas"] and found["distances"]
        rows = zip(found["ids"][0], found["documents"][0], found["metadatas"][0], found["distances"][0], strict=True)
        matches = [
            Match(Passage(id, str(about["source"]), int(str(about["position"])), text), distance)
            for id, text, about, distance in rows
        ]
        # Which of two equally near passages comes first must not depend on the order in which they were warmed.
        return sorted(matches, key=lambda match: (match.distance, match.passage.id))

    def _open(self) -> Collection:
        from chromadb.errors import NotFoundError

        try:
            passages = self._client.get_collection(PASSAGES, embedding_function=None)
        except NotFoundError:
            # A wide search: the passages found should not depend on the order in which they were warmed.
            return self._client.create_collection(
                PASSAGES,
                embedding_function=None,
                configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
                metadata={"embedding": self.embedding.name},
            )
        filled_by = (passages.metadata or {}).get("embedding")
        if filled_by != self.embedding.name:
            raise ConfigError(
                f"the passages in {self._folder} were embedded by {filled_by}, not by {self.embedding.name}; name that one with "
                "--embedding, or warm into another folder"
            )
        return passages

    def _shown(self) -> dict[str, tuple[str, int]]:
        """Return source and position of every passage in Chroma, by id."""
        found = self._passages.get(include=["metadatas"])
        return {
            id: (str(about["source"]), int(str(about["position"])))
            for id, about in zip(found["ids"], found["metadatas"] or [], strict=True)
        }

    def _remove(self, shown: dict[str, tuple[str, int]], wanted: set[str], roots: list[str]) -> int:
        """Remove what is gone from the files, and KV without a passage; return how many passages that were."""
        stale = [id for id, (source, _) in shown.items() if id not in wanted and _is_below(source, roots)]
        for group in _groups(stale, _DELETE_GROUP):
            self._passages.delete(ids=group)
            for id in group:
                del shown[id]
        orphans = [id for id in self._engine.ids() if id not in shown and id not in wanted]
        for group in _groups(orphans, _DELETE_GROUP):
            self._engine.delete(group)
        return len(stale)

    def _fitting(self, group: list[Passage], budget_bytes: int | None) -> list[Passage]:
        """Return the passages, from the first on, that the budget has room for."""
        decoder = self._engine.decoder
        if budget_bytes is None or decoder is None:
            return group
        room = budget_bytes - self._engine.store.stats().disk_bytes
        known = self._engine.records([passage.id for passage in group])
        separator = self._engine.config.separator
        for number, (passage, record) in enumerate(zip(group, known, strict=True)):
            if record is not None and self._engine.store.holds([record.key])[0]:
                continue
            # Behind each passage the KV of what follows it is kept.
            texts = [text for text in (passage.text, separator) if text]
            tokens = sum(map(len, self._engine.tokenizer(texts, add_special_tokens=False)["input_ids"]))
            room -= tokens * decoder.kv_bytes_per_token + _FILE_BYTES_PER_LAYER * decoder.num_kv_layers
            if room < 0:
                return group[:number]
        return group

    def _show(self, passages: list[Passage], shown: dict[str, tuple[str, int]]) -> None:
        """Put passages into Chroma, and correct the place of those that moved within their file."""
        new = [passage for passage in passages if passage.id not in shown]
        moved = [
            passage
            for passage in passages
            if shown.get(passage.id, (passage.source, passage.position))[1] != passage.position
        ]
        if new:
            texts = [passage.text for passage in new]
            vectors = self.embedding.embed(texts)
            self._passages.upsert(
                ids=[passage.id for passage in new],
                documents=texts,
                embeddings=vectors,  # type: ignore[arg-type]  # a list of lists is taken as well
                metadatas=[{"source": passage.source, "position": passage.position} for passage in new],
            )
        if moved:
            self._passages.update(
                ids=[passage.id for passage in moved],
                metadatas=[{"source": passage.source, "position": passage.position} for passage in moved],
            )


def passage_chunk(passage: Passage) -> Chunk:
    """Return the chunk of a passage: a piece of the file that it stands in."""
    return Chunk(passage.text, passage.id, document=passage.source, start=passage.start)


def reading_order(matches: Iterable[Match]) -> list[Match]:
    """Return passages as they stand in their files: what one leans on should come before it."""
    return sorted(matches, key=lambda match: (match.passage.source, match.passage.position))


def _is_below(source: str, roots: list[str]) -> bool:
    return any(source == root or source.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


def _groups(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
