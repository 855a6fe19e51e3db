"""Proof that a vLLM answers behind KV that it is brought as behind KV that it computed: whatever its release, by trying it."""

from __future__ import annotations

import logging
import os
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_rag.keys import chunk_key
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.model import ModelCard
from cacheblend_rag.rope import shift_layer
from cacheblend_rag.store import KVStore, open_store
from vllm_cacheblend.asking import NAMES_VARIABLE, PROBE, Precision, proved_params, spool_params, transfer_params
from vllm_cacheblend.fitting import OTHERWISE
from vllm_cacheblend.prefix import PrefixPiece, StoredPrefix
from vllm_cacheblend.spooling import read_spool, remove_spool

__all__ = ["NUM_LOGPROBS", "Probe", "Said", "prove", "prove_by"]

logger = logging.getLogger(__name__)

NUM_LOGPROBS = 5
"""How many of the likeliest tokens are compared."""

# Half of the probe's tokens: all of them fill a block of any size in use, and begin another.
_HALF = 72


@dataclass(frozen=True)
class Said:
    """What vLLM says next, with log probabilities, and how many tokens it did not compute."""

    logprobs: Mapping[Any, float]
    num_cached: int | None

    def far(self, other: Said) -> float:
        """Return the largest difference of a log probability; of a token that one does not list, the least that it can be."""
        return max(_beyond(self.logprobs, other.logprobs), _beyond(other.logprobs, self.logprobs))


def _beyond(these: Mapping[Any, float], those: Mapping[Any, float]) -> float:
    least = min(those.values())
    return max(
        abs(value - those[token]) if token in those else max(0.0, value - least) for token, value in these.items()
    )


Probe = Callable[[Sequence[int], str, dict[str, Any]], Said]
"""Asks vLLM for one token after a prompt, under a salt, with `kv_transfer_params`."""


def prove(llm: Any) -> None:
    """See that an `LLM` of vLLM, started with `kv_transfer_config(..., spool=...)`, answers behind KV as it should.

    The connector brings no KV to a release of vLLM that it was not tested with before this has passed. It asks for one token
    five times, after some 144.

    Raises
    ------
    ConfigError
        If it does not, with what differed; or if vLLM was started without a spool.
    """
    from vllm import SamplingParams

    extra = llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
    if extra.get("spool") is None:
        raise ConfigError("vLLM writes no KV, by which it could be proved; give kv_transfer_config a spool")

    def probe(ids: Sequence[int], salt: str, params: dict[str, Any]) -> Said:
        asked = SamplingParams(
            temperature=0, max_tokens=1, logprobs=NUM_LOGPROBS, extra_args={"kv_transfer_params": params}
        )
        [output] = llm.generate([{"prompt_token_ids": list(ids), "cache_salt": salt}], asked, use_tqdm=False)
        [likeliest] = output.outputs[0].logprobs
        return Said({token: each.logprob for token, each in likeliest.items()}, output.num_cached_tokens)

    window = llm.llm_engine.vllm_config.model_config.max_model_len
    card = ModelCard.from_dict(extra["card"])
    precision = Precision(*extra["precision"])
    with closing(open_store(extra["store"], 0, names=os.environ.get(NAMES_VARIABLE) or None)) as store:
        prove_by(probe, card, precision, llm.get_tokenizer(), window, store, Path(extra["spool"]))


def prove_by(
    probe: Probe,
    card: ModelCard,
    precision: Precision,
    tokenizer: Any,
    window: int | None,
    store: KVStore,
    spool: Path,
) -> None:
    """See by requests that a vLLM answers behind KV as it should, and tell its connector so; see `prove`.

    `store` is vLLM's, opened with a codec that keeps KV exactly.
    """
    half = min(_HALF, (window or 2 * _HALF) // 2 - 1)
    ids = _some_ids(tokenizer, 2 * half)
    turned = ids[half:] + ids[:half]
    salt = secrets.token_hex(16)
    own, kv = _computed(probe, card, spool, ids, salt)
    _, other = _computed(probe, card, spool, turned, secrets.token_hex(16))
    _check_rotation(card, precision, kv, other, half)
    # After a prefix of its own vLLM computes other shapes, which round otherwise.
    noise = own.far(probe(ids, salt, {}))
    allowed = max(4 * noise, float(torch.finfo(card.dtype).eps) ** 0.5)
    behind, control = (own.far(_behind(probe, store, ids, layers)) for layers in (kv, other))
    if not behind <= allowed:
        raise ConfigError(
            f"after loading KV that this vLLM itself computed, its log probabilities differ by {behind:.2g} from those after "
            f"computing it ({allowed:.2g} is allowed; two computations differ by {noise:.2g}): it reads its blocks differently "
            f"than this connector writes them; {OTHERWISE}"
        )
    if control <= allowed:
        raise ConfigError(
            f"after loading KV of other tokens, the log probabilities of this vLLM differ by only {control:.2g} from those "
            f"after the right KV: it does not read what this connector writes; {OTHERWISE}"
        )
    probe(ids[:2], secrets.token_hex(16), proved_params())
    logger.info(
        "the probe passed: after loading KV, log probabilities differ by %.2g (two computations: %.2g, KV of other tokens: %.2g)",
        behind,
        noise,
        control,
    )


def _some_ids(tokenizer: Any, count: int) -> tuple[int, ...]:
    # No added ones: they may stand for an image, or end an answer.
    known = sorted(set(range(len(tokenizer))) - getattr(tokenizer, "added_tokens_decoder", {}).keys())
    drawn = torch.randint(len(known), (count,), generator=torch.Generator().manual_seed(0))
    return tuple(known[place] for place in drawn.tolist())


def _computed(
    probe: Probe, card: ModelCard, spool: Path, ids: tuple[int, ...], salt: str
) -> tuple[Said, list[LayerKV]]:
    """Have vLLM compute a prompt and write its KV."""
    name = uuid.uuid4().hex
    try:
        said = probe(ids, salt, spool_params(name))
        return said, read_spool(spool, name, [heads for heads, _, _ in card.shapes])
    finally:
        remove_spool(spool, name)


def _check_rotation(
    card: ModelCard, precision: Precision, kv: Sequence[LayerKV], other: Sequence[LayerKV], half: int
) -> None:
    """See that keys are turned as the card says: in the first layer a token's know nothing but where it stands."""
    there, here = (
        LayerKV(*(part[:, rows].clone() for part in each[0]))
        for each, rows in (
            (kv, slice(half, None)),
            (other, slice(0, half)),
        )
    )
    rotation = card.rotations[0]
    if rotation is not None:
        shift_layer(here, rotation.table(torch.full((half,), half), torch.device("cpu")))
    wrong = [float((one - two).abs().max() / one.abs().max()) for one, two in zip(there, here, strict=True)]
    kept = torch.float8_e4m3fn if precision.kv_cache_dtype.startswith("fp8") else card.dtype
    if not max(wrong) <= torch.finfo(kept).eps ** 0.5:
        raise ConfigError(
            f"keys and values of the same tokens at two places of a prompt differ by {max(wrong):.2g} of the largest, once the "
            f"keys are turned as the card says: this vLLM turns the model's keys otherwise; {OTHERWISE}"
        )


def _behind(probe: Probe, store: KVStore, ids: tuple[int, ...], layers: list[LayerKV]) -> Said:
    """Return what vLLM says behind KV that it is brought."""
    # Several servers over one store may be proved at once.
    namespace = f"{PROBE}/{uuid.uuid4().hex}"
    key = chunk_key(namespace, ids, is_head=True)
    prefix = StoredPrefix(ids, (PrefixPiece(key, 0, len(ids)),), namespace, "")
    store.put(key, ChunkKV(ids, 0, layers))
    try:
        said = probe(ids, secrets.token_hex(16), transfer_params(prefix))
    finally:
        store.discard(key)
    if said.num_cached is not None and said.num_cached != len(ids) - 1:
        raise BackendError(
            f"of a probe of {len(ids)} tokens vLLM took {said.num_cached} from the store, not {len(ids) - 1}; its log says why"
        )
    return said
