"""cacheblend-rag for vLLM: prompts begin with the KV of stored chunks, and vLLM computes the rest."""

from vllm_cacheblend.asking import Precision, kv_transfer_config, spool_params, tokens_prompt, transfer_params
from vllm_cacheblend.prefix import StoredPrefix, stored_prefix
from vllm_cacheblend.proving import prove

__all__ = [
    "CONNECTOR",
    "Precision",
    "StoredPrefix",
    "kv_transfer_config",
    "prove",
    "register",
    "spool_params",
    "stored_prefix",
    "tokens_prompt",
    "transfer_params",
]

CONNECTOR = "CacheBlendConnector"
"""The name by which vLLM knows the connector."""


def register() -> None:
    """Tell vLLM of the connector; vLLM calls this itself, wherever this package is installed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_cacheblend.connector", CONNECTOR)
