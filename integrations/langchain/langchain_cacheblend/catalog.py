"""The texts of an engine's named chunks, kept in step with it, to be found in prompts."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.chunk import Segment, text_hash
from langchain_cacheblend.find import HEAD_CHARS, ChunkFinder

__all__ = ["ChunkCatalog", "catalog_of"]

logger = logging.getLogger(__name__)

_BATCH = 1000


class ChunkCatalog:
    """Knows which text every named chunk of an engine has, by whatever door and process it came.

    The engine keeps a chunk's tokens and the digest of its text; the text is decoded from the tokens once and checked against the
    digest. It is not kept: `ChunkFinder` needs less.
    """

    def __init__(self) -> None:
        self._finder = ChunkFinder()
        self._passed_over: dict[str, str] = {}
        self._revision: int | None = None
        self._warned = False
        self._lock = threading.Lock()

    def split(self, engine: BlendEngine, text: str, min_chars: int = HEAD_CHARS) -> list[Segment]:
        """Split a text into the stored chunks that stand in it, and the text around them.

        A chunk that was deleted or replaced by then is text, and each chunk of the result carries its text, so that the engine
        can tell if that happens later still.

        Parameters
        ----------
        engine : BlendEngine
            Whose chunks.
        text : str
            A prompt, or a part of one.
        min_chars : int
            Chunks shorter than this are left to the text.

        Returns
        -------
        list of Segment
            Strings and `Chunk` objects, whose texts joined are `text`.
        """
        with self._lock:
            self._refresh(engine)
            matches = self._finder.find(text, min_chars)
        records = engine.records([match.id for match in matches])
        segments: list[Segment] = []
        end = 0
        for match, record in zip(matches, records, strict=True):
            if record is None or record.text_hash != match.digest:
                continue
            if match.start > end:
                segments.append(text[end : match.start])
            segments.append(Chunk(text[match.start : match.stop], match.id))
            end = match.stop
        if end < len(text):
            segments.append(text[end:])
        return segments

    def _refresh(self, engine: BlendEngine) -> None:
        # Read first, so that what changes during the pass is seen by the next one.
        revision = engine.revision
        if revision == self._revision:
            return
        ids = engine.ids()
        gone = (self._finder.ids() | self._passed_over.keys()).difference(ids)
        self._finder.remove(gone)
        for id in gone:
            self._passed_over.pop(id, None)
        for start in range(0, len(ids), _BATCH):
            self._learn(engine, ids[start : start + _BATCH])
        self._revision = revision

    def _learn(self, engine: BlendEngine, ids: Sequence[str]) -> None:
        """Take in those of the chunks that are new or have another text than before."""
        fresh: list[tuple[str, str]] = []
        for id, record in zip(ids, engine.records(ids), strict=True):
            if record is None or record.text_hash in (self._finder.digest(id), self._passed_over.get(id)):
                continue
            text = engine.tokenizer.decode(
                list(record.token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            readable = text_hash(text) == record.text_hash
            if readable and len(text) >= HEAD_CHARS:
                self._passed_over.pop(id, None)
                fresh.append((id, text))
            else:
                self._finder.remove([id])
                self._passed_over[id] = record.text_hash
            if not readable and not self._warned:
                self._warned = True
                logger.warning(
                    "the text of chunk %r does not come back from its tokens with this tokenizer, so it is not found in plain "
                    "prompts; pass documents as blocks (documents_to_blocks) to have such chunks reused (this is said once)",
                    id,
                )
        self._finder.add(fresh)


_catalogs: weakref.WeakKeyDictionary[BlendEngine, ChunkCatalog] = weakref.WeakKeyDictionary()
_catalogs_lock = threading.Lock()


def catalog_of(engine: BlendEngine) -> ChunkCatalog:
    """Return the one catalog of an engine, which all models over it share; it is made when it is first asked for."""
    with _catalogs_lock:
        catalog = _catalogs.get(engine)
        if catalog is None:
            catalog = _catalogs[engine] = ChunkCatalog()
        return catalog
