"""Constants that benchmarks and tests change for comparisons."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cacheblend_rag.errors import ConfigError

__all__ = ["Tuning", "usable_cores"]

_LEAST = {
    "encode_batch_tokens": 1,
    "decode_batch_tokens": 1,
    "prefetch_layers": 1,
    "load_threads": 1,
    "write_back_bytes": 0,
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of an engine, one good value each; given to `BlendEngine` as ``tuning=``.

    Attributes
    ----------
    encode_batch_tokens, decode_batch_tokens : int
        Maximum tokens encoded in one batch, padding included; maximum tokens of KV, including padding and room for the answers,
        with which prompts of one call are decoded together.
    prefetch_layers, load_threads : int
        Layers that the loader may be ahead of the computation, and threads that read, check and decode stored KV meanwhile; None
        is one for every two cores, at most 4.
    page_locked : bool, optional
        Whether the RAM tier's memory is page-locked, so that a CUDA device copies from it without the processor; by default if
        the model is on one.
    write_back_bytes : int
        Maximum bytes of KV of misses that wait in RAM to be written to disk in the background. A miss beyond that
        is not stored. With 0 an answer waits for its misses to be written.
    self_check : bool
        Whether a new engine verifies blending on its model with random tokens, which takes a few small forward passes.

    Raises
    ------
    ConfigError
        If a value is invalid.
    """

    encode_batch_tokens: int = 4096
    decode_batch_tokens: int = 32_768
    prefetch_layers: int = 2
    load_threads: int | None = None
    page_locked: bool | None = None
    write_back_bytes: int = 256 * 1024**2
    self_check: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if (type(value) is not int or value < least) and (name != "load_threads" or value is not None):
                raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")

    @property
    def threads(self) -> int:
        """Number of threads that load."""
        if self.load_threads is not None:
            return self.load_threads
        return max(1, min(4, usable_cores() // 2))


def usable_cores() -> int:
    """Return how many cores this thread, and those that it starts, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
