"""Remote tiers: KV under content keys in Redis, Valkey or any fsspec filesystem, shared by machines.

Names stay in each machine's own index. The bytes are those of a chunk file (`cacheblend_rag.store.chunkformat`), so that every
byte read from a remote tier is verified before it is used.
"""

from cacheblend_rag.store.remote.base import RemoteSettings, RemoteTier
from cacheblend_rag.store.remote.urls import open_remote
from cacheblend_rag.store.remote.writer import RemoteWriter, UploadStats

__all__ = ["RemoteSettings", "RemoteTier", "RemoteWriter", "UploadStats", "open_remote"]
