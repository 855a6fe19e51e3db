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
    """Find out how a model is blended.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    strict : bool
        Whether a model that cannot be blended is refused.
    self_check : bool
        Whether blending is verified on it.

    Returns
    -------
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    unsupported : str or None
        Why it cannot.

    Raises
    ------
    UnsupportedModelError
        If it cannot, and `strict` is set.
    """
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
    """Return a digest of a model and a tokenizer.

    Parameters
    ----------
    model : PreTrainedModel
        The model; all its weights are read.
    tokenizer : Any
        The tokenizer; its vocabulary and rules are read.
    private : bool
        Whether the store is seen by this engine alone. A random identity then does as well, and no weights need to be
        read.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    if private:
        return uuid.uuid4().hex
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{model_fingerprint(model)}|{rules}".encode(), digest_size=16).hexdigest()


def open_engine_store(
    store: KVStore | str | Path | None, config: EngineConfig, tuning: Tuning, decoder: Decoder | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name.

    Parameters
    ----------
    store : KVStore, str, Path or None
        A folder, or None for this process's RAM; a store that is open already is returned.
    config : EngineConfig
        The settings.
    tuning : Tuning
        Whether memory is page-locked, and how much waits to be written.
    decoder : Decoder or None
        The model, on whose devices KV is kept too; None if it cannot be blended.

    Raises
    ------
    ConfigError
        If `store` is none of these.
    StoreFormatError
        If the folder is no store, or one of another version.
    StoreReadOnlyError
        If a store cannot be made there. One that is there but cannot be opened, for whatever reason, is replaced by RAM.
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
