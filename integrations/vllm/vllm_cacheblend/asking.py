"""Parameters that a request gives the connector, and those that vLLM is started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import Rotation
from cacheblend_rag.model import ModelCard
from vllm_cacheblend.prefix import PrefixPiece, StoredPrefix

__all__ = [
    "FULL",
    "NAMES_VARIABLE",
    "Precision",
    "REMOTE_VARIABLE",
    "SERVER_VARIABLE",
    "asked_pieces",
    "asked_spool",
    "kv_transfer_config",
    "read_card",
    "spool_params",
    "tokens_prompt",
    "transfer_params",
    "write_card",
]

REMOTE_VARIABLE, NAMES_VARIABLE = "CACHEBLEND_REMOTE", "CACHEBLEND_NAMES"
"""The environment variables by which vLLM is told the store's remote tier, and where its names are that machines share: a URL may
hold a password, which vLLM's log would show."""

SERVER_VARIABLE = "_CACHEBLEND_SERVER"
"""The environment variable that has the id of a server's process, with which its vLLM is to end."""

Read = TypeVar("Read")

_PARAMETER, _SPOOL = "cacheblend", "cacheblend_spool"
_NAME = TypeAdapter(Annotated[str, Field(pattern="^[0-9a-f]{32}$")])
_PIECES = TypeAdapter(tuple[str, tuple[PrefixPiece, ...]])


class Precision(NamedTuple):
    """How vLLM quantises a model's weights, and keeps KV in its blocks, by the names of its own options."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"


FULL = Precision()
"""In the model's own dtype."""


def kv_transfer_config(
    card: ModelCard, store: str | Path, *, ram_bytes: int = 1 << 30, precision: Precision = FULL
) -> dict[str, Any]:
    """Return what vLLM is started with to take KV from a store: for `LLM`, or as JSON for ``vllm serve``.

    The store's remote tier, and the names that it shares with other machines, are those at the addresses in the environment
    variables CACHEBLEND_REMOTE and CACHEBLEND_NAMES, which may hold passwords.

    Parameters
    ----------
    card : ModelCard
        What `BlendEngine.card` returns of the model that vLLM is to serve.
    store : str or Path
        The store's folder.
    ram_bytes : int
        Most bytes of KV that each of vLLM's workers keeps in RAM, of what it read last.
    precision : Precision
        How vLLM runs the model, where vLLM encodes for the store; by default in the card's dtype.
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
            "card": write_card(card),
            "ram_bytes": ram_bytes,
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
    return {_PARAMETER: [prefix.namespace, [list(piece) for piece in prefix.pieces]]}


def spool_params(name: str) -> dict[str, Any]:
    """Return `kv_transfer_params` of a request whose KV is to be written for `VLLMLibrary`, under a name of 32 hex digits."""
    return {_SPOOL: name}


def asked_spool(params: Mapping[str, Any] | None) -> str | None:
    """Return the name under which a request's KV is to be written; `ConfigError` if it cannot be that of a file of ours."""
    name = None if params is None else params.get(_SPOOL)
    return None if name is None else _read(_NAME, name, _SPOOL)


def asked_pieces(params: Mapping[str, Any] | None) -> tuple[str, tuple[PrefixPiece, ...]] | None:
    """Return the namespace and the pieces that a request asks for, None for nothing of ours; `ConfigError` if unreadable."""
    asked = None if params is None else params.get(_PARAMETER)
    return None if asked is None else _read(_PIECES, asked, _PARAMETER)


def _read(form: TypeAdapter[Read], given: object, name: str) -> Read:
    try:
        return form.validate_python(given)
    except ValidationError as error:
        raise ConfigError(
            f"kv_transfer_params[{name!r}] cannot be read; make it by transfer_params or spool_params: {error}"
        ) from error


def write_card(card: ModelCard) -> dict[str, Any]:
    """Return a card as JSON has it; `read_card` reads it."""
    different = list({id(each): each for each in card.rotations if each is not None}.values())
    numbers = {id(each): number for number, each in enumerate(different)}
    return {
        "identity": card.identity,
        "window": card.window,
        "rope_reach": card.rope_reach,
        "dtype": str(card.dtype).removeprefix("torch."),
        "shapes": [list(shape) for shape in card.shapes],
        "rotations": [
            {"inv_freq": each.inv_freq.tolist(), "layout": each.layout, "part": each.part} for each in different
        ],
        "layers": [None if each is None else numbers[id(each)] for each in card.rotations],
    }


def read_card(given: Mapping[str, Any]) -> ModelCard:
    """Return the card that `write_card` wrote; `ConfigError` if it is none."""
    try:
        different = [
            Rotation(torch.tensor(each["inv_freq"], dtype=torch.float32), each["layout"], each["part"])
            for each in given["rotations"]
        ]
        heads = tuple((int(count), int(keys), int(values)) for count, keys, values in given["shapes"])
        layers = tuple(None if number is None else different[number] for number in given["layers"])
        dtype = getattr(torch, given["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{given['dtype']!r} is not a dtype")
        return ModelCard(str(given["identity"]), given["window"], dtype, heads, layers, given["rope_reach"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"this is not a model card ({type(error).__name__}: {error}); give kv_transfer_config what BlendEngine.card() returns"
        ) from error
