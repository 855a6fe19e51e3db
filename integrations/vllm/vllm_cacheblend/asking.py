"""Parameters that a request gives the connector, and those that vLLM is started with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import ModelCard
from vllm_cacheblend.prefix import PrefixPiece, StoredPrefix

__all__ = [
    "FULL",
    "NAMES_VARIABLE",
    "PROBE",
    "Precision",
    "REMOTE_VARIABLE",
    "asked_pieces",
    "asked_spool",
    "kv_transfer_config",
    "proved_params",
    "says_proved",
    "spool_params",
    "tokens_prompt",
    "transfer_params",
]

REMOTE_VARIABLE, NAMES_VARIABLE = "CACHEBLEND_REMOTE", "CACHEBLEND_NAMES"
"""The environment variables by which vLLM is told the store's remote tier, and where its names are that machines share: a URL may
hold a password, which arguments would show."""

PROBE = "probe"
"""Beginning of the namespaces of what the connector is proved by; those of models are hexadecimal digits."""

_PARAMETER, _SPOOL, _PROVED = "cacheblend", "cacheblend_spool", "cacheblend_proved"
_KEY = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[0-9a-f]{32}")


class Precision(NamedTuple):
    """How vLLM runs a model, by the names of its own options.

    Attributes
    ----------
    quantization : str or None
        How its weights are quantised.
    kv_cache_dtype : str
        How its blocks keep KV.
    """

    quantization: str | None = None
    kv_cache_dtype: str = "auto"


FULL = Precision()
"""In the model's own dtype."""


def kv_transfer_config(
    card: ModelCard,
    store: str | Path,
    *,
    ram_bytes: int = 1 << 30,
    spool: str | Path | None = None,
    precision: Precision = FULL,
) -> dict[str, Any]:
    """Return what vLLM is started with to take KV from a store.

    Nothing in it is secret. The store's remote tier, and the names that it shares with other machines, are those at the addresses
    in the environment variables CACHEBLEND_REMOTE and CACHEBLEND_NAMES.

    Parameters
    ----------
    card : ModelCard
        What `BlendEngine.card` returns of the model that vLLM is to serve.
    store : str or Path
        The store's folder.
    ram_bytes : int
        Most bytes of KV that each of vLLM's workers keeps in RAM, of what it read last.
    spool : str or Path, optional
        A folder, in memory best, for the KV that vLLM is asked to compute for the store (`VLLMEncoder`); by default it is asked
        for none.
    precision : Precision
        How vLLM runs the model, where vLLM encodes for the store; by default in the card's dtype.

    Returns
    -------
    dict
        For ``LLM(kv_transfer_config=...)``; as JSON, for ``vllm serve --kv-transfer-config``.
    """
    return {
        "kv_connector": "CacheBlendConnector",
        # Also where the package is on the path and not installed.
        "kv_connector_module_path": "vllm_cacheblend.connector",
        "kv_role": "kv_both",
        # What cannot be loaded is computed; vLLM's default fails the request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(Path(store).expanduser().absolute()),
            "card": card.to_dict(),
            "ram_bytes": ram_bytes,
            "spool": None if spool is None else str(Path(spool).expanduser().absolute()),
            "precision": list(precision),
        },
    }


def tokens_prompt(prefix: StoredPrefix) -> dict[str, Any]:
    """Return a prompt as vLLM takes it, in token ids.

    Its salt keeps vLLM's own prefix cache apart: KV that was read behind other text is never taken for that of the tokens alone,
    nor one tenant's for another's.
    """
    return {"prompt_token_ids": list(prefix.token_ids), "cache_salt": prefix.salt}


def transfer_params(prefix: StoredPrefix) -> dict[str, Any]:
    """Return what a request has as `kv_transfer_params`: where the KV is that its prompt begins with."""
    pieces = [[piece.key, piece.first, piece.count] for piece in prefix.pieces]
    return {_PARAMETER: {"namespace": prefix.namespace, "pieces": pieces}}


def spool_params(name: str) -> dict[str, Any]:
    """Return what a request has as `kv_transfer_params` whose KV is to be written to the spool, under a name of 32 hex digits."""
    return {_SPOOL: name}


def proved_params() -> dict[str, Any]:
    """Return what a request has as `kv_transfer_params` which says that the probe has passed."""
    return {_PROVED: True}


def says_proved(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request says that the probe has passed."""
    return params is not None and params.get(_PROVED) is True


def asked_spool(params: Mapping[str, Any] | None) -> str | None:
    """Return the name under which a request's KV is to be written to the spool; None for most requests.

    Raises
    ------
    ConfigError
        If it cannot be the name of a file there.
    """
    name = None if params is None else params.get(_SPOOL)
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigError(f"kv_transfer_params[{_SPOOL!r}] is {name!r:.60}; give 32 hexadecimal digits")
    return name


def asked_pieces(params: Mapping[str, Any] | None) -> tuple[str, tuple[PrefixPiece, ...]] | None:
    """Return the namespace and the pieces that a request asks for; None where it asks for nothing of ours.

    Raises
    ------
    ConfigError
        If it cannot be read.
    """
    asked = None if params is None else params.get(_PARAMETER)
    if asked is None:
        return None
    try:
        namespace = asked["namespace"]
        pieces = tuple(PrefixPiece(key, int(first), int(count)) for key, first, count in asked["pieces"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"kv_transfer_params[{_PARAMETER!r}] cannot be read ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(namespace, str) or not all(
        isinstance(each.key, str) and _KEY.fullmatch(each.key) and each.first >= 0 and each.count > 0 for each in pieces
    ):
        raise ConfigError(
            f"kv_transfer_params[{_PARAMETER!r}] has a piece of no key or no tokens; make it by transfer_params"
        )
    return namespace, pieces
