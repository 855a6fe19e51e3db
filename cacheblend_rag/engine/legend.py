"""What token ids and chunks mean: the text of tokens, as they come, and what chunks were encoded behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, NamedTarget
from cacheblend_rag.trace import ChunkContext, TracedChunk

__all__ = ["EngineLegend", "Spelling"]

# What a decoder writes for the bytes of a character that is not whole.
_UNFINISHED = "\ufffd"
# No character takes more tokens than it has bytes in UTF-8; behind so many the bytes are no text.
_MOST_TOKENS = 4


class Spelling:
    """Spells tokens out one after the other: all pieces together are the text of all tokens.

    A token may be written otherwise at the beginning of a text (without its space), so each is read behind those before it.

    Parameters
    ----------
    decode : callable
        Returns the text of tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The tokens behind which the next are read, whose text is known, and those whose text is not complete.
        self._before: list[int] = []
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that is certain with a further token: none, where a character takes more tokens."""
        self._new.append(token_id)
        text = self._text()
        if not text or (text.endswith(_UNFINISHED) and len(self._new) < _MOST_TOKENS):
            return ""
        self._before, self._new = self._new, []
        return text

    def rest(self) -> str:
        """Return the text that was not certain, at the end."""
        text = self._text()
        self._before, self._new = self._before + self._new, []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]


class EngineLegend:
    """Says what token ids and chunks mean, by an engine's tokenizer and its store while that is open.

    Parameters
    ----------
    tokenizer : Any
        The model's tokenizer.
    store : KVStore
        Where names are. A report does not keep it alive.
    namespace : str
        Whose names.
    """

    def __init__(self, tokenizer: Any, store: KVStore, namespace: str) -> None:
        self._tokenizer = tokenizer
        self._store = weakref.ref(store)
        self._namespace = namespace

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several tokens is the last one's."""
        decode, shown = self._tokenizer.decode, {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        spelling = Spelling(lambda ids: decode(ids, **shown))
        texts = [spelling.add(each) for each in token_ids]
        return [*texts[:-1], texts[-1] + spelling.rest()] if texts else []

    def contexts(self, chunks: Sequence[TracedChunk]) -> list[ChunkContext]:
        """Return what each chunk was encoded behind, as far as the store still knows."""
        store, ids = self._store(), list(dict.fromkeys(chunk.id for chunk in chunks if chunk.id is not None))
        targets: dict[str | None, NamedTarget | None] = {}
        documents: dict[str, list[str]] = {}
        # A store that is closed, or cannot be read now, is no reason to show nothing.
        with suppress(StoreError):
            if store is not None:
                targets |= zip(ids, store.names.targets(self._namespace, ids), strict=True)
                for name in {
                    each.document for each in targets.values() if each is not None and each.document is not None
                }:
                    documents[name] = store.names.document(self._namespace, name)
        return [_context(chunk, targets.get(chunk.id), documents) for chunk in chunks]


def _context(chunk: TracedChunk, target: NamedTarget | None, documents: Mapping[str, list[str]]) -> ChunkContext:
    # Of a name that leads elsewhere by now nothing is said: it is another chunk, or one in another context.
    if target is None or target.record.key != chunk.key:
        return ChunkContext(None, None if chunk.remembers else ())
    if target.behind is None or target.document is None:
        return ChunkContext(target.document, ())
    ids, tokens = documents.get(target.document, []), target.behind.end - target.behind.begin
    if chunk.id not in ids:
        return ChunkContext(target.document, None, tokens)
    return ChunkContext(target.document, tuple(ids[target.behind.first : ids.index(chunk.id)]), tokens)
