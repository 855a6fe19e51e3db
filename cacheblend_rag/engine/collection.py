"""What a vector store has of an engine's chunks, and what it has no longer."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import ClassVar
from weakref import WeakSet

from cacheblend_rag.engine.protocol import Present
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore

__all__ = ["ChunkCollection"]

logger = logging.getLogger(__name__)

# Names that the vector store is asked for at once, and as many as are looked through before a wrapper is opened.
_BATCH = 1000
# How the names of collections begin that end with their process.
_PASSING = "?"


class ChunkCollection:
    """The chunks of an engine that a vector store has; `BlendEngine.collection` makes one, which first forgets what is gone.

    Parameters
    ----------
    store : KVStore
        The engine's store.
    namespace : str
        Where its names are.
    delete : callable
        The engine's `delete`.
    name : str or None
        The collection's name, in every process; None if nobody knows it, which then lasts as long as this object.
    is_known : bool
        Whether no other vector store can have that name: only then is it noticed what the vector store has no longer.
    present : callable
        Returns those of some ids that the vector store has; None if it cannot say.

    Attributes
    ----------
    owner : str
        What its chunks are added with.
    """

    _living: ClassVar[WeakSet[ChunkCollection]] = WeakSet()

    def __init__(
        self,
        store: KVStore,
        namespace: str,
        delete: Callable[..., int],
        name: str | None,
        is_known: bool,
        present: Present,
    ) -> None:
        self.owner = name or f"{_PASSING}{uuid.uuid4().hex}"
        self._store = store
        self._namespace = namespace
        self._delete = delete
        self._is_known = is_known and name is not None
        self._present = present
        self._living.add(self)
        if self._is_known:
            # Where that takes long, it is done in the background.
            with suppress(StoreError):
                if len(self.ids()) <= _BATCH:
                    self.notice()
                else:
                    threading.Thread(target=self.notice, name="cacheblend-notice", daemon=True).start()

    def ids(self, sources: Collection[str] | None = None) -> list[str]:
        """Return the ids that were added for this collection, or those of them that were made of these sources."""
        return self._store.names.owned(self._namespace, self.owner, sources)

    def filling(self) -> AbstractContextManager[None]:
        """Say that chunks are named which the vector store does not have yet, and will have at the end."""
        return self._store.turns.filling()

    def forget(self, ids: Sequence[str], sources: Sequence[str] = ()) -> None:
        """Forget chunks, and all that was made of whole sources, which the vector store has no longer."""
        self._delete(ids, sources=sources)
        living = {each.owner for each in list(self._living) if not each._store.is_closed}
        for source in sources:
            owners = self._store.names.owners(self._namespace, source)
            ended = {owner for owner in owners if owner.startswith(_PASSING) and owner not in living}
            for owner in sorted({self.owner, *ended}):
                self._delete((), owner=owner, sources=[source])

    def notice(self, sources: Collection[str] | None = None, spared: Collection[str] = ()) -> int:
        """Forget what the vector store has no longer, all or of some sources, without the ids that are `spared`.

        Nothing is forgotten while somebody fills the store, since what it names may not be in its vector store yet. Whatever
        keeps the vector store from answering keeps nobody from using it.

        Returns
        -------
        int
            How many chunks were forgotten.
        """
        forgotten = 0
        try:
            owned = self.ids(sources) if self._is_known else []
            owned = [id for id in owned if id not in spared]
            for start in range(0, len(owned), _BATCH):
                batch = owned[start : start + _BATCH]
                with self._store.turns.alone() as is_alone:
                    held = self._present(batch) if is_alone else None
                    if held is None:
                        break
                    gone = [id for id in batch if id not in set(held)]
                    if gone:
                        forgotten += self._delete(gone, owner=self.owner)
        except Exception as error:  # whatever a vector store raises, and an engine that was closed meanwhile
            logger.debug("it is not known what the vector store has no longer: %s", error)
        if forgotten:
            logger.info("forgot %d chunks that the vector store has no longer", forgotten)
        return forgotten
