"""Which chunks are retrieved for the first time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from cacheblend_rag.store import KVStore

__all__ = ["FirstUses"]

_REMEMBERED = 1 << 17


class FirstUses:
    """Tells the first retrieval of a chunk without KV from the second, in this process.

    Parameters
    ----------
    store : KVStore
        Where KV is looked for.
    limit : int
        Most chunks remembered; those retrieved longest ago are forgotten, and begin anew.
    """

    def __init__(self, store: KVStore, limit: int = _REMEMBERED) -> None:
        self._store = store
        self._limit = limit
        self._lock = threading.Lock()
        self._once: OrderedDict[str, None] = OrderedDict()

    def note(self, keys: Iterable[str]) -> set[str]:
        """Note that a prompt retrieves these chunks; return the keys without KV that no prompt retrieved before.

        A chunk that is retrieved a second time is forgotten: it is encoded now, and once its KV is evicted it must be retrieved
        twice again.
        """
        keys = list(dict.fromkeys(keys))
        # A folder's store does not count as held what it keeps in RAM alone, for texts without a name.
        missing = [
            key
            for key, held in zip(keys, self._store.holds(keys), strict=True)
            if not held and self._store.open(key) is None
        ]
        first = set()
        with self._lock:
            for key in missing:
                if key in self._once:
                    del self._once[key]
                else:
                    first.add(key)
                    self._once[key] = None
            while len(self._once) > self._limit:
                self._once.popitem(last=False)
        return first
