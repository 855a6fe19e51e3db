"""Opening the store of an engine by its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.config import EngineConfig, Tuning
from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreReadOnlyError
from cacheblend_rag.model import Decoder
from cacheblend_rag.store import KVStore, open_store

__all__ = ["open_engine_store"]

logger = logging.getLogger(__name__)


def open_engine_store(
    store: KVStore | str | Path | None, config: EngineConfig, tuning: Tuning, decoder: Decoder | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name; one that is open already is returned."""
    if isinstance(store, KVStore):
        return store
    if not isinstance(store, str | Path | None):
        raise ConfigError(
            f"store is a {type(store).__name__}; give a folder, or what open_store returned, which several engines may share"
        )
    devices = [torch.device("cpu")] if decoder is None else decoder.devices
    by_default = any(device.type == "cuda" for device in devices)
    settings: dict[str, Any] = {
        "page_locked": by_default if tuning.page_locked is None else tuning.page_locked,
        "ram_bytes": config.ram_bytes,
        "disk_bytes": config.disk_bytes,
        "ram_codec": config.ram_codec,
        "disk_codec": config.disk_codec,
        "remote": None if config.remote is None else config.remote.get_secret_value(),
        "names": config.names_url,
    }
    try:
        return open_store(store, **settings)
    except StoreError as error:
        # Another folder was meant; or it is RAM that fails.
        if store is None or isinstance(error, StoreFormatError | StoreReadOnlyError):
            raise
        logger.warning(
            "the store cannot be opened, so KV is kept in the memory of this process and is lost with it: %s", error
        )
        return open_store(None, **settings)
