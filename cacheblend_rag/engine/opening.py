"""What an engine does when it is made: it looks at its model, and opens its store."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine.scheduling import scheduler_lock
from cacheblend_rag.engine.selfcheck import check_blending
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model import Decoder, inspect_model
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.device import spare_bytes
from cacheblend_rag.tuning import Tuning

__all__ = ["look_at_model", "open_engine_store"]

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
        with scheduler_lock(model):
            decoder = inspect_model(model)
            if self_check:
                check_blending(decoder)
    except UnsupportedModelError as error:
        if strict:
            raise
        logger.warning("%s; its prompts are prefilled as a whole", error)
        return None, str(error)
    return decoder, None


def open_engine_store(
    store: str | Path | None, config: EngineConfig, tuning: Tuning, decoder: Decoder | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name.

    Parameters
    ----------
    store : str, Path or None
        A folder, or None for this process's RAM.
    config : EngineConfig
        The settings.
    tuning : Tuning
        Whether memory is page-locked, and how much waits to be written.
    decoder : Decoder or None
        The model, on whose devices KV is kept too; None if it cannot be blended.

    Raises
    ------
    StoreError
        If the folder cannot be used.
    """
    devices = [torch.device("cpu")] if decoder is None else decoder.devices
    by_default = any(device.type == "cuda" for device in devices)
    device_bytes = 0
    if decoder is not None:
        device_bytes = spare_bytes(devices) if config.device_bytes is None else config.device_bytes
    return open_store(
        store,
        device_bytes=device_bytes,
        devices=devices,
        page_locked=by_default if tuning.page_locked is None else tuning.page_locked,
        ram_bytes=config.ram_bytes,
        disk_bytes=config.disk_bytes,
        ram_codec=config.ram_codec,
        disk_codec=config.disk_codec,
        remote=config.remote,
        write_back_bytes=tuning.write_back_bytes,
    )
