"""The texts of an engine's named chunks, kept in step with it, to be found in prompts."""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from cacheblend_rag.chunk import BlendPrompt, Chunk, Segment, is_part, text_hash
from cacheblend_rag.engine import Library
from cacheblend_rag.errors import BackendError, StoreError
from cacheblend_rag.lexer import MARK, lexer_of
from cacheblend_rag.store import NameChanges

__all__ = ["HEAD_CHARS", "ChunkCatalog", "ChunkFinder", "catalog_of"]

logger = logging.getLogger(__name__)

_BATCH = 1000
HEAD_CHARS = 16
"""Number of leading characters that a text is recognised by; shorter texts are not found."""


class Match(NamedTuple):
    """A known text that stands at ``text[start:stop]``, and all of its ids."""

    start: int
    stop: int
    ids: tuple[str, ...]


class ChunkFinder:
    """Finds every known text that occurs verbatim in a longer one; not thread-safe."""

    def __init__(self) -> None:
        # Of each id its text's digest, by which it is known again, and its beginning and length: (None, 0) of what is not found.
        self.entries: dict[str, tuple[str, str | None, int]] = {}
        # The ids of a text, by its beginning, its length, and its digest.
        self._texts: dict[str, dict[int, dict[str, dict[str, None]]]] = {}

    def add(self, id: str, digest: str, text: str) -> None:
        """Make a text and its digest known in place of an earlier one of this id; what is too short is known, but not found."""
        self.remove([id])
        if len(text) < HEAD_CHARS:
            self.entries[id] = digest, None, 0
            return
        head = text[:HEAD_CHARS]
        self.entries[id] = digest, head, len(text)
        self._texts.setdefault(head, {}).setdefault(len(text), {}).setdefault(digest, {})[id] = None

    def remove(self, ids: Iterable[str]) -> None:
        """Make texts unknown; ids that are not known do no harm."""
        for id in ids:
            digest, head, length = self.entries.pop(id, ("", None, 0))
            if head is None:
                continue
            alike = self._texts[head]
            del alike[length][digest][id]
            if not alike[length][digest]:
                del alike[length][digest]
            if not alike[length]:
                del alike[length]
            if not alike:
                del self._texts[head]

    def find(self, text: str, min_chars: int = HEAD_CHARS) -> list[Match]:
        """Return where known texts of `min_chars` or more stand in `text`, in order; of those that overlap, the longest."""
        found: list[Match] = []
        for start in range(len(text) - HEAD_CHARS + 1):
            for length, known in self._texts.get(text[start : start + HEAD_CHARS], {}).items():
                fits = min_chars <= length <= len(text) - start
                if fits and (ids := known.get(text_hash(text[start : start + length]))):
                    found.append(Match(start, start + length, tuple(ids)))
        chosen: list[Match] = []
        for match in sorted(found, key=lambda match: (match.start - match.stop, match.start)):
            if all(match.stop <= other.start or other.stop <= match.start for other in chosen):
                chosen.append(match)
        return sorted(chosen)


class ChunkCatalog:
    """Knows the text of every named chunk of an engine, however and by whichever process it was added."""

    def __init__(self) -> None:
        self._finder = ChunkFinder()
        # Which name has which number, as `Library.changes` counts them.
        self._names: dict[int, str] = {}
        self._mark: int | None = None
        self._warned = self._is_out = False
        self._lock = threading.Lock()

    def split(self, engine: Library, text: str, min_chars: int = HEAD_CHARS) -> list[Segment]:
        """Split a text into the chunks of `min_chars` or more that stand in it, as of the last `follow`, and the text around."""
        # Each carries its text, so that the engine can tell if it is deleted or replaced meanwhile.
        said = text.split(MARK)
        marks, plain = list(accumulate(map(len, said[:-1]))), "".join(said)
        thoughts = lexer_of(engine.tokenizer).thoughts
        searched = plain if thoughts is None else thoughts.hide(text, MARK).replace(MARK, "")
        with self._lock:
            matches = self._finder.find(searched, min_chars)
        is_clear = all(len(match.ids) == 1 for match in matches)
        ids = [match.ids[0] for match in matches] if is_clear else _choose(engine, matches)
        cuts = [0, *chain.from_iterable((match.start, match.stop) for match in matches), len(plain)]
        at = [cut + len(MARK) * bisect_left(marks, cut) for cut in cuts]
        segments: list[Segment] = []
        for number, (match, id) in enumerate(zip(matches, ids, strict=True)):
            segments += [text[at[2 * number] : at[2 * number + 1]], Chunk(plain[match.start : match.stop], id)]
        segments.append(text[at[-2] : at[-1]])
        return [each for each in segments if each]

    def prompt(
        self, engine: Library, parts: Sequence[Segment], min_chars: int = HEAD_CHARS, asked: str | None = None
    ) -> BlendPrompt:
        """Return the prompt of these parts, with the stored chunks told apart that stand in its text."""
        if asked is None:
            asked = parts[-1] if parts and isinstance(parts[-1], str) else ""
        self.follow(engine)
        segments: list[Segment] = []
        begin = 0
        for part in parts:
            begin = len(segments)
            segments += self.split(engine, part, min_chars) if isinstance(part, str) else [part]
        segments = _with_question(segments, begin, asked, engine.tokenizer)
        return BlendPrompt(segments=segments)

    def follow(self, engine: Library) -> None:
        """Take in what has changed; where that cannot be read, chunks are looked for as they were known before."""
        with self._lock:
            try:
                changes = engine.changes(self._mark)
                if changes.whole or changes.names:
                    self._take_in(engine, changes)
                self._is_out = False
            except (BackendError, StoreError) as error:
                if not self._is_out:
                    self._is_out = True
                    logger.warning(
                        "the list of stored chunks cannot be read now, so new ones are not found in prompts: %s", error
                    )

    def _take_in(self, engine: Library, changes: NameChanges) -> None:
        if changes.whole:
            before = set(self._finder.entries)
            self._names = {}
        else:
            # What a number stood for: it may be gone, or stand for another name now.
            before = {self._names.pop(number) for number, _, _ in changes.names if number in self._names}
        self._names.update((number, id) for number, id, _ in changes.names if id is not None)
        # The text of a part is a label.
        live = {id: text for _, id, text in changes.names if id is not None and text is not None and not is_part(id)}
        self._finder.remove(before - live.keys())
        fresh = [id for id, digest in live.items() if digest != self._finder.entries.get(id, ("",))[0]]
        for start in range(0, len(fresh), _BATCH):
            self._learn(engine, fresh[start : start + _BATCH])
        self._mark = changes.mark

    def _learn(self, engine: Library, ids: Sequence[str]) -> None:
        """Take in chunks that are new or have another text than before."""
        records = [record for record in engine.records(ids) if record is not None]
        texts = lexer_of(engine.tokenizer).texts([record.token_ids for record in records])
        for record, text in zip(records, texts, strict=True):
            readable = text_hash(text) == record.text_hash
            self._finder.add(record.id, record.text_hash, text if readable else "")
            if not readable and not self._warned:
                self._warned = True
                logger.warning(
                    "the text of chunk %r cannot be restored from its tokens with this tokenizer, so it is not found in plain "
                    "prompts; pass documents as blocks (documents_to_blocks) to reuse such chunks (this warning is not repeated)",
                    record.id,
                )


def _with_question(segments: list[Segment], begin: int, asked: str, tokenizer: Any) -> list[Segment]:
    """Return segments with the last one that is a chunk as text, if it was found from `begin` on and is the end of `asked`."""
    place = max((n for n in range(begin, len(segments)) if isinstance(segments[n], Chunk)), default=0)
    before, found = segments[place - 1 : place + 1] if place else ("", "")
    if not isinstance(found, Chunk) or not asked.rstrip().endswith(found.text.rstrip()):
        return segments
    if not isinstance(before, str) or (place > 1 and not before.strip()):
        return segments
    after = "".join(each for each in segments[place + 1 :] if isinstance(each, str))
    return [*segments[: place - 1], f"{before}{lexer_of(tokenizer).said(found.text)}{after}"]


def _choose(engine: Library, matches: Sequence[Match]) -> list[str | None]:
    """Return the id that serves each match; None, for a text of no document, where it is in several that its KV has seen."""
    every = list(dict.fromkeys(id for match in matches for id in match.ids))
    try:
        known = {record.id: record for record in engine.records(every) if record is not None}
    except StoreError:
        # Whichever it is, the engine will find that its name cannot be read.
        return [match.ids[0] for match in matches]

    def serving(ids: tuple[str, ...]) -> str | None:
        is_one = len({known[id].keys if id in known else None for id in ids}) == 1
        return next((id for id in ids if is_one or id not in known or known[id].document is None), None)

    return [serving(match.ids) for match in matches]


_catalogs: weakref.WeakKeyDictionary[Library, ChunkCatalog] = weakref.WeakKeyDictionary()
_catalogs_lock = threading.Lock()


def catalog_of(engine: Library) -> ChunkCatalog:
    """Return the one catalog of an engine, which all models over it share; it is made when it is first asked for."""
    with _catalogs_lock:
        if engine not in _catalogs:
            _catalogs[engine] = ChunkCatalog()
        return _catalogs[engine]
