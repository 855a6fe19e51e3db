"""What an engine does when it is made: it looks at its model, and opens its store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.scheduling import scheduler_lock
from cacheblend_rag.engine.selfcheck import check_blending
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.model import Decoder, inspect_model
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.device import spare_bytes

__all__ = ["look_at_model", "open_engine_store"]

logger = logging.getLogger(__name__)


def look_at_model(model: PreTrainedModel, config: BlendConfig) -> tuple[Decoder | None, str | None]:
    """Find out how a model is blended.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    config : BlendConfig
        Whether blending is verified on it (`self_check`), and whether a model that cannot be blended is refused (`strict`).

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
            if config.self_check:
                check_blending(decoder)
    except UnsupportedModelError as error:
        if config.strict:
            raise
        logger.warning("%s; its prompts are prefilled as a whole", error)
        return None, str(error)
    return decoder, None


def open_engine_store(store: str | Path | None, config: BlendConfig, decoder: Decoder | None) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name.

    Parameters
    ----------
    store : str, Path or None
        A folder, or None for this process's RAM.
    config : BlendConfig
        The settings.
    decoder : Decoder or None
        The model, on whose devices KV is kept too; None if it cannot be blended.

    Raises
    ------
    StoreError
        If the folder cannot be used.
    """
    devices = [torch.device("cpu")] if decoder is None else decoder.devices
    return open_store(
        store,
        device_bytes=_device_bytes(devices, config, decoder),
        devices=devices,
        page_locked=_page_locked(devices, config),
        ram_bytes=config.ram_bytes,
        disk_bytes=config.disk_bytes,
        ram_codec=config.ram_codec,
        disk_codec=config.disk_codec,
        remote=config.remote,
        write_back_bytes=config.write_back_bytes,
    )


def _device_bytes(devices: Sequence[torch.device], config: BlendConfig, decoder: Decoder | None) -> int:
    if decoder is None:
        return 0
    return spare_bytes(devices) if config.device_bytes is None else config.device_bytes


def _page_locked(devices: Sequence[torch.device], config: BlendConfig) -> bool:
    by_default = any(device.type == "cuda" for device in devices)
    return by_default if config.page_locked is None else config.page_locked
