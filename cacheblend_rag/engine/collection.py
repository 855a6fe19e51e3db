"""What vector stores have of an engine's chunks, and what they have no longer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import ClassVar
from weakref import WeakSet

from cacheblend_rag.engine.protocol import Library, Present

__all__ = ["ChunkCollection"]

logger = logging.getLogger(__name__)

# Names that a vector store is asked for at once.
_BATCH = 1000


class ChunkCollection:
    """The chunks of a library that a vector store has.

    `present` returns those of some ids that the vector store has; None if it cannot say. Of a chunk that one vector store
    has no longer, the other ones of this process over the same library are asked.
    """

    _living: ClassVar[WeakSet[ChunkCollection]] = WeakSet()

    def __init__(self, library: Library, present: Present) -> None:
        self._library = library
        self._present = present
        self._living.add(self)

    def forget(self, ids: Sequence[str], sources: Sequence[str] = ()) -> None:
        """Forget chunks, and all that was made of whole sources and that no other vector store has."""
        made = self._library.indexed(sources) if sources else []
        others = [each for each in self._family() if each is not self]
        kept = set().union(*(each._present(made) or () for each in others)) if made else set()
        self._library.delete([*ids, *(id for id in made if id not in kept)], sources=sources)

    def sync(self, sources: Collection[str] | None = None, spared: Collection[str] = ()) -> int:
        """Forget what no vector store has any more, all or of some sources, without the ids that are `spared`; return how many.

        What keeps a vector store from answering keeps no user from using it.
        """
        forgotten = 0
        try:
            ids = [id for id in self._library.indexed(sources) if id not in spared]
            for start in range(0, len(ids), _BATCH):
                left = ids[start : start + _BATCH]
                for each in self._family():
                    if (held := each._present(left)) is None:
                        return forgotten
                    left = [id for id in left if id not in set(held)]
                forgotten += self._library.delete(left)
        except Exception as error:  # whatever a vector store raises, and an engine that was closed meanwhile
            logger.debug("it is not known what the vector store has no longer: %s", error)
        return forgotten

    def _family(self) -> list[ChunkCollection]:
        return [each for each in list(self._living) if each._library is self._library]
