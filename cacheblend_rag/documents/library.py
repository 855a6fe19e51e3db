"""Passages in Chroma, and their KV in the engine's store, kept in step in one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cacheblend_rag.chat.render import around_context
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.settings import kv_folder
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, StoreError, needs_extra
from cacheblend_rag.files import locked
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.store import KVStore, open_store

if TYPE_CHECKING:
    from chromadb.api.client import Client

__all__ = [
    "PASSAGES",
    "Library",
    "Match",
    "WarmResult",
    "clear_library",
    "open_chroma",
    "open_library",
    "open_to_clear",
    "passage_config",
]

PASSAGES = "chunks"
"""The name of the Chroma collection."""
# Passages encoded, embedded and shown together; what a killed run has to do again at most.
_GROUP = 64
_DELETE_GROUP = 1000
_INSTRUCTION = "Answer the question from the context only.\n\n"
_SEPARATOR = "\n"

_T = TypeVar("_T")


def passage_config(config: EngineConfig | None = None) -> EngineConfig:
    """Return settings, by default the environment's, with the `separator` of `Library.prompt` unless they name one."""
    config = EngineConfig.of(config)
    if "separator" in config.model_fields_set:
        return config
    return config.replace(separator=_SEPARATOR)


@contextmanager
def open_chroma(folder: Path) -> Iterator[Client]:
    """Open the Chroma of a library, made if there is none; `ConfigError` if it is not installed, `StoreError` if it fails."""
    with needs_extra("documents", "a library of documents"):
        import chromadb
        from chromadb.config import Settings
        from chromadb.errors import ChromaError

    def failure(reason: BaseException) -> StoreError:
        chroma = folder / "chroma"
        return StoreError(f"Chroma in {chroma} failed: {reason}; if it is damaged, remove that folder and warm again")

    try:
        # Chroma's files hold the passages, and are as open as the folder.
        (folder / "chroma").mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = Settings(anonymized_telemetry=False)
        client = cast("Client", chromadb.PersistentClient(str(folder / "chroma"), settings=settings))
    except Exception as error:
        # Of any type: where opening fails, cleaning up after it fails too, and hides the reason.
        raise failure(error.__context__ or error) from error
    try:
        yield client
    except ChromaError as error:
        raise failure(error) from error
    finally:
        client.close()


def clear_library(folder: Path) -> None:
    """Remove every passage and all KV; the folder stays. `StoreError` if another process is changing the library."""
    with _alone_in(folder), open_chroma(folder) as client:
        if PASSAGES in (collection.name for collection in client.list_collections()):
            client.delete_collection(PASSAGES)
        with closing(open_to_clear(kv_folder(folder))) as store:
            store.clear()


def open_to_clear(kv: Path) -> KVStore:
    """Open a store to be emptied: with the names of all machines if it follows them, else with its own, whatever settings say."""
    try:
        return open_store(kv, ram_bytes=0)
    except StoreError:
        return open_store(kv, ram_bytes=0, names=EngineConfig().names_url)


@dataclass(frozen=True, slots=True)
class WarmResult:
    """Figures of a `Library.warm`."""

    # Passages whose KV was computed, was there already, and was deleted with them.
    encoded: int
    unchanged: int
    removed: int
    tokens: int
    # Bytes of KV in the store now.
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """A passage that was found, and its cosine distance from the question."""

    chunk: Chunk
    distance: float


@contextmanager
def open_library(folder: Path, engine: BlendEngine, embedding: Embedding) -> Iterator[Library]:
    """Open the library in a folder; see `Library`."""
    with open_chroma(folder) as client:
        yield Library(folder, client, engine, embedding)


class Library:
    """Passages in Chroma and their KV in the engine's store, the folder ``kv``."""

    # KV is written before its passage is shown in Chroma, and removed after it: whatever Chroma finds has been encoded. What a
    # killed run leaves is KV without a passage, which the next `warm` finds.

    def __init__(self, folder: Path, client: Client, engine: BlendEngine, embedding: Embedding) -> None:
        self._folder = folder
        self._engine = engine
        self.embedding = embedding
        self._passages = client.get_or_create_collection(
            PASSAGES,
            embedding_function=None,
            # A wide search: the passages found should not depend on the order in which they were warmed.
            configuration={"hnsw": {"space": "cosine", "ef_search": 200}},
            metadata={"embedding": embedding.name},
        )
        filled_by = (self._passages.metadata or {}).get("embedding")
        if filled_by != embedding.name:
            raise ConfigError(
                f"the passages in {folder} were embedded by {filled_by}, not by {embedding.name}; pass the former with "
                "--embedding, or warm into another folder"
            )

    def __len__(self) -> int:
        return self._passages.count()

    def warm(
        self,
        passages: Sequence[Chunk],
        roots: Sequence[Path],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> WarmResult:
        """Make the library hold exactly `passages`, all of the files at and below `roots`; other files' passages stay.

        `progress` is called with the number of finished passages and of all. `StoreError` if another process is changing
        this library, or KV cannot be stored; what was warmed until then stays.
        """
        with _alone_in(self._folder):
            shown = self._shown()
            wanted = {str(passage.id) for passage in passages}
            removed = self._remove(shown, wanted, roots)
            done = encoded = tokens = 0
            report = progress or (lambda done, total: None)
            for group in _groups(passages, _GROUP):
                added = self._engine.add(
                    group,
                    progress=lambda count, _, before=done: report(before + count, len(passages)),  # type: ignore[misc]
                )
                encoded, tokens, done = encoded + added.encoded, tokens + added.tokens, done + len(group)
                self._show(group, shown)
            kv_bytes = self._engine.store.stats().disk_bytes
            return WarmResult(encoded, done - encoded, removed, tokens, kv_bytes)

    def passages(self) -> list[Chunk]:
        """Return all passages, by their files and in the order in which they stand there."""
        found = self._passages.get(include=["documents", "metadatas"])
        rows = zip(found["ids"], found["documents"] or [], found["metadatas"] or [], strict=True)
        return sorted((_chunk(*row) for row in rows), key=attrgetter("document", "start"))

    def search(self, question: str, top_k: int) -> list[Match]:
        """Return the `top_k` passages nearest to the question as they stand in their files: what one leans on comes first."""
        found = self._passages.query(
            query_embeddings=self.embedding.embed([question]),  # type: ignore[arg-type]  # a list of lists is taken as well
            n_results=top_k,
            include=["documents", "metadatas", "distances"],
        )
        assert found["documents"] and found["metadatas"] and found["distances"]
        rows = zip(found["ids"][0], found["documents"][0], found["metadatas"][0], found["distances"][0], strict=True)
        matches = [Match(_chunk(id, text, about), distance) for id, text, about, distance in rows]
        return sorted(matches, key=attrgetter("chunk.document", "chunk.start"))

    def prompt(self, question: str, matches: Sequence[Match]) -> BlendPrompt:
        """Return the prompt that asks a question of what was found, as a user's message where there is a chat template."""
        tokenizer = self._engine.tokenizer
        prefix, suffix = _INSTRUCTION, f"\n\nQuestion: {lexer_of(tokenizer).said(question)}"
        if getattr(tokenizer, "chat_template", None):
            prefix, suffix = around_context(tokenizer, prefix, suffix)
        else:
            suffix += "\nAnswer: "
        return BlendPrompt(prefix, [match.chunk for match in matches], suffix, separator=_SEPARATOR)

    def _shown(self) -> dict[str, tuple[str, int]]:
        """Return the file of every passage in Chroma, and where it begins there, by id."""
        found = self._passages.get(include=["metadatas"])
        return {
            id: (str(about["source"]), int(str(about["start"])))
            for id, about in zip(found["ids"], found["metadatas"] or [], strict=True)
        }

    def _remove(self, shown: dict[str, tuple[str, int]], wanted: set[str], roots: Sequence[Path]) -> int:
        """Remove what is gone from the files, and KV without a passage; return how many passages that were."""
        below = [os.path.abspath(root) for root in roots] + [str(root.resolve()) for root in roots]
        stale = [id for id, (source, _) in shown.items() if id not in wanted and _is_below(source, below)]
        for group in _groups(stale, _DELETE_GROUP):
            self._passages.delete(ids=group)
            for id in group:
                del shown[id]
        self._engine.sync(shown.keys() | wanted)
        return len(stale)

    def _show(self, passages: list[Chunk], shown: dict[str, tuple[str, int]]) -> None:
        """Put passages into Chroma, and correct the place of those that moved within their file."""
        places: dict[str, Mapping[str, Any]] = {
            str(passage.id): {"source": passage.document, "start": passage.start} for passage in passages
        }
        new = {str(passage.id): passage.text for passage in passages if passage.id not in shown}
        if new:
            self._passages.upsert(
                ids=list(new),
                documents=list(new.values()),
                embeddings=self.embedding.embed([*new.values()]),  # type: ignore[arg-type]  # a list of lists is taken as well
                metadatas=[places[id] for id in new],
            )
        moved = [id for id, place in places.items() if id in shown and shown[id][1] != place["start"]]
        if moved:
            self._passages.update(ids=moved, metadatas=[places[id] for id in moved])


def _chunk(id: str, text: str, about: Mapping[str, Any]) -> Chunk:
    """Return a passage as it stands in Chroma."""
    return Chunk(text, id, document=str(about["source"]), start=int(str(about["start"])))


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    """Keep other processes from changing the library meanwhile."""
    return locked(folder / "warm.lock", 0.0, f"another process is changing {folder}; wait until it is done")


def _is_below(source: str, roots: list[str]) -> bool:
    return any(source == root or source.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


def _groups(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
