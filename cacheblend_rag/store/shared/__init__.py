"""Names that machines share: one truth about what chunks and documents there are, beside each machine's own index.

Each machine keeps a whole copy of the names in its index, and brings it up to date before every look-up. What is acknowledged on
one machine is therefore what the next look-up finds on any other; where the truth is out of reach, nothing is looked up at all.
"""

from __future__ import annotations

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.remote import RemoteSettings, redis_address, shown_url
from cacheblend_rag.store.shared.following import SharedNames, follows_others
from cacheblend_rag.store.shared.log import Behind, NameLog, Page

__all__ = ["Behind", "NameLog", "Page", "SharedNames", "follows_others", "open_names"]

# Whoever waits for names waits for an answer: what was out of reach is tried again soon.
_MAX_BACK_OFF_S = 4.0


def open_names(url: str) -> NameLog:
    """Return the names that a Redis or Valkey server keeps for all machines. Nothing is connected to until it is used.

    Parameters
    ----------
    url : str
        As of a remote tier: ``redis://user:password@host:6379/0``. The server should keep what it acknowledges (``appendonly
        yes``, ``appendfsync always``) and evict nothing (``maxmemory-policy noeviction``), so it is best another than the one
        that has the KV.

    Returns
    -------
    NameLog
        The names.

    Raises
    ------
    ConfigError
        If it is no URL of Redis, or the package is missing.
    """
    found = redis_address(url)
    if found is None:
        raise ConfigError(
            f"names are shared through Redis or Valkey, and {shown_url(url)} is neither; give redis://host:port/db"
        )
    from cacheblend_rag.store.shared.redis import RedisNameLog

    address, location, hidden = found
    return RedisNameLog(address, location, hidden, RemoteSettings(max_back_off_s=_MAX_BACK_OFF_S))
