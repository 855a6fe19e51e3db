"""Making an engine: the model is inspected, its KV gets an identity, the store is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreReadOnlyError, UnsupportedModelError
from cacheblend_rag.fuse.selfcheck import check_blending
from cacheblend_rag.model import Decoder, inspect_model, model_fingerprint
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.device import spare_bytes
from cacheblend_rag.tuning import Tuning

__all__ = ["engine_identity", "look_at_model", "open_engine_store"]

logger = logging.getLogger(__name__)


def look_at_model(model: PreTrainedModel, *, strict: bool, self_check: bool) -> tuple[Decoder | None, str | None]:
    """Return the model as blending sees it, or None and why it cannot be blended; `strict` raises that."""
    try:
        # Another engine may be at work on it.
        with scheduler_of(model):
            decoder = inspect_model(model)
            if self_check:
                check_blending(decoder)
    except UnsupportedModelError as error:
        if strict:
            raise
        logger.warning("%s; its prompts are prefilled in full", error)
        return None, str(error)
    return decoder, None


def engine_identity(model: PreTrainedModel, tokenizer: Any, *, private: bool) -> str:
    """Return a digest of a model's weights and a tokenizer's vocabulary and rules: 32 hexadecimal digits.

    In a `private` store, seen by this engine alone, a random identity does as well, and no weights need to be read.
    """
    if private:
        return uuid.uuid4().hex
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{model_fingerprint(model)}|{rules}".encode(), digest_size=16).hexdigest()


def open_engine_store(
    store: KVStore | str | Path | None, config: EngineConfig, tuning: Tuning, decoder: Decoder | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name; one that is open already is returned.

    A folder that is no store, is one of another version, or cannot be written though there is no store in it, is refused. A
    store that is there but cannot be opened, for whatever reason, is replaced by RAM.
    """
    if isinstance(store, KVStore):
        return store
    if not isinstance(store, str | Path | None):
        raise ConfigError(
            f"store is a {type(store).__name__}; give a folder, or what open_store returned, which several engines may share"
        )
    devices = [torch.device("cpu")] if decoder is None else decoder.devices
    by_default = any(device.type == "cuda" for device in devices)
    device_bytes = 0
    if decoder is not None:
        device_bytes = spare_bytes(devices) if config.device_bytes is None else config.device_bytes
    settings: dict[str, Any] = {
        "device_bytes": device_bytes,
        "devices": devices,
        "page_locked": by_default if tuning.page_locked is None else tuning.page_locked,
        "ram_bytes": config.ram_bytes,
        "disk_bytes": config.disk_bytes,
        "ram_codec": config.ram_codec,
        "disk_codec": config.disk_codec,
        "remote": None if config.remote is None else config.remote.get_secret_value(),
        "names": config.names_url,
        "write_back_bytes": tuning.write_back_bytes,
    }
    try:
        return open_store(store, **settings)
    except (StoreFormatError, StoreReadOnlyError):
        # Another folder was meant.
        raise
    except StoreError as error:
        if store is None:
            raise
        logger.warning(
            "the store cannot be opened, so KV is kept in the memory of this process and ends with it: %s", error
        )
        return open_store(None, **settings)
