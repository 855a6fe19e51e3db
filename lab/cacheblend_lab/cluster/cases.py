"""Costs that this project has measured, as its figures in docs/results say; none is of a GPU."""

from __future__ import annotations

from pathlib import Path

from cacheblend_lab.cluster.costs import Costs, TierCost, read_costs
from cacheblend_rag.errors import ConfigError

__all__ = ["CASES", "costs_of"]

# bench-tiers-reuse.json: 6 chunks of 512 tokens, 33 further tokens; TTFT of full prefill, of reuse from RAM and from disk.
_FULL_S, _FROM_RAM_S, _FROM_DISK_S = 17.604, 0.4985, 0.5062
_CONTEXT_TOKENS, _COMPUTED_TOKENS = 3072, 33
# bench-load.json: files of those chunks, float32, and the seconds of the loader with one thread.
_FILE_BYTES, _LOAD_S = 75_539_328, 0.0441
# bench-tpot.json: seconds a further token after such a prompt.
_TPOT_S = 0.139
# docs/codecs.md: what int8, the disk's default, takes of float32.
_INT8_OF_FLOAT32 = 0.25
# Not measured: a network of 10 Gb/s, half a millisecond away.
_NETWORK_BYTES_PER_S, _NETWORK_READ_S = 1.25e9, 0.0005


def _qwen_on_cpu() -> Costs:
    computed_s = _FULL_S / (_CONTEXT_TOKENS + _COMPUTED_TOKENS)
    # Of the loading, what does not show in the time to the first token hides.
    hidden = 1 - (_FROM_DISK_S - _FROM_RAM_S) / _LOAD_S
    return Costs(
        name="Qwen2-0.5B's shape, float32, two CPU cores",
        source=(
            "docs/results/bench-tiers-reuse.json (prefill, reuse), bench-load.json (disk; docs/codecs.md for int8), "
            "bench-tpot.json (decoding, taken to gain nothing from batches); the remote tier's 10 Gb/s and 0.5 ms are assumed"
        ),
        stored_bytes_per_token=_FILE_BYTES / _CONTEXT_TOKENS * _INT8_OF_FLOAT32,
        prefill_s_per_request=0.0,
        prefill_s_per_token=computed_s,
        reuse_s_per_token=(_FROM_RAM_S - _COMPUTED_TOKENS * computed_s) / _CONTEXT_TOKENS,
        decode_s_per_step=0.0,
        decode_s_per_answer_step=_TPOT_S,
        overlap=hidden,
        disk=TierCost(0.0, _FILE_BYTES / _LOAD_S),
        remote=TierCost(_NETWORK_READ_S, _NETWORK_BYTES_PER_S),
    )


CASES = {"qwen2-0.5b-cpu": _qwen_on_cpu()}
"""Costs by the name that `bench cluster plan --costs` takes."""


def costs_of(text: str) -> Costs:
    """Return the costs of a case by its name, or those in a file."""
    if text in CASES:
        return CASES[text]
    if not Path(text).is_file():
        raise ConfigError(
            f"{text!r} is neither a cost file nor a case ({', '.join(CASES)}); "
            "write one with `cacheblend-rag bench cluster assume`"
        )
    return read_costs(Path(text))
