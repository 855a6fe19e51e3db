"""Constants of an engine, of which each has one good value; tests and benchmarks change them for comparisons."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Tuning", "usable_cores"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of an engine."""

    # Most tokens that are encoded in one batch, padding included.
    encode_batch_tokens: int = 4096
    # Most tokens of KV, padding and room for the answers included, with which prompts are decoded together.
    decode_batch_tokens: int = 32_768
    # Layers that the loader may be ahead of the computation.
    prefetch_layers: int = 2
    # Threads that read, check and decode stored KV meanwhile; None is one for every two cores, at most 4.
    load_threads: int | None = None
    # Whether the RAM tier's memory is page-locked; by default if the model is on a CUDA device.
    page_locked: bool | None = None
    # Whether a new engine verifies blending on its model with random tokens, which takes a few small forward passes.
    self_check: bool = True

    @property
    def threads(self) -> int:
        """Number of threads that load."""
        if self.load_threads is not None:
            return self.load_threads
        return max(1, min(4, usable_cores() // 2))


def usable_cores() -> int:
    """Return how many cores this thread, and those that it starts, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
