"""cacheblend-rag for vLLM: prompts begin with the KV of stored chunks, and vLLM computes the rest."""

import ctypes
import os
import signal
import sys

from vllm_cacheblend.asking import (
    SERVER_VARIABLE,
    Precision,
    kv_transfer_config,
    spool_params,
    tokens_prompt,
    transfer_params,
)
from vllm_cacheblend.prefix import StoredPrefix, stored_prefix

__all__ = [
    "CONNECTOR",
    "Precision",
    "StoredPrefix",
    "kv_transfer_config",
    "register",
    "spool_params",
    "stored_prefix",
    "tokens_prompt",
    "transfer_params",
]

CONNECTOR = "CacheBlendConnector"
"""The name by which vLLM knows the connector."""


def register() -> None:
    """Tell vLLM of the connector; vLLM calls this itself, in each of its processes, wherever this package is installed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_cacheblend.connector", CONNECTOR)
    if os.environ.get(SERVER_VARIABLE) == str(os.getppid()):
        # Ctrl-C is for the server, which lets answers end before it stops vLLM.
        os.setpgid(0, 0)
        # PR_SET_PDEATHSIG: where the server is killed, Linux ends vLLM.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)
