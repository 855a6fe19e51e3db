"""One prompt on its way through the engine: what was asked, what is done, whence its KV, and what all of it took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import Plan
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.taken import Resumption
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.store import KVReader, NamedTarget

__all__ = ["ChunkSupply", "Outcome", "PromptRun", "Request", "Timings"]


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked.

    Attributes
    ----------
    blend : BlendConfig
        The settings in force.
    started : float
        When the call came, by `time.perf_counter`.
    wait_until : float or None
        Until when it waits for the model, by `time.perf_counter`; None for as long as it takes.
    conversation : Conversation or None
        The conversation that it is a turn of.
    resets : int
        How often that had been reset when the call came.
    guard_level : int or None
        Which settings of the online guard these are; None for settings that the guard has nothing to do with.
    guard_action : str or None
        What the guard changed in them.
    rows : torch.Tensor or None
        The chunk rows to recompute, ascending, where no selector is to choose them.
    """

    blend: BlendConfig
    started: float
    wait_until: float | None = None
    conversation: Conversation | None = None
    resets: int = 0
    guard_level: int | None = None
    guard_action: str | None = None
    rows: torch.Tensor | None = None


@dataclass(slots=True)
class ChunkSupply:
    """Where the KV of a prompt's chunks comes from.

    Attributes
    ----------
    hits : list of bool
        For each chunk, whether its KV was there when the call came: in the store, or at its place in the conversation.
    tiers : list of (str or None)
        For each chunk, where its stored KV is read from; None for a miss.
    unreadable : set of str
        Keys of the chunks whose stored KV turned out damaged.
    encoded : dict of (str, ChunkKV)
        KV of misses that was computed before the prompt's turn came, by key.
    contexts : dict of (str, NamedTarget)
        By their keys, how the KV of chunks is computed that was not stored when the prompt's turn came.
    expiry : dict of str to float
        Of a turn of a conversation, when the KV of its chunks is over, by `steady_s` and by their keys.
    head_tokens : int
        Rows of the fixed head that were stored when the call came.
    """

    hits: list[bool] = field(default_factory=list)
    tiers: list[str | None] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    encoded: dict[str, ChunkKV] = field(default_factory=dict)
    contexts: dict[str, NamedTarget] = field(default_factory=dict)
    expiry: dict[str, float] = field(default_factory=dict)
    head_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """What answering took.

    Attributes
    ----------
    encode_s, open_s, wait_s : float
        Seconds spent on encoding misses, on opening stored KV, and, in the forward, on waiting for it.
    load_bytes : int
        Bytes of KV that were loaded.
    forward_started : float
        When the forward began, by `time.perf_counter`.
    forward_ended : float or None
        When the prefill ended, where other prompts were prefilled before the first output; None where that follows at once.
    """

    encode_s: float = 0.0
    open_s: float = 0.0
    wait_s: float = 0.0
    load_bytes: int = 0
    forward_started: float = 0.0
    forward_ended: float | None = None


@dataclass(slots=True)
class Outcome:
    """What came of the prefill and the decoding.

    Attributes
    ----------
    recomputed : torch.Tensor or None
        The chunk rows recomputed by the prefill; None when the whole prompt was computed.
    charge : float
        Work done on chunk rows, in decoder-block rows; without meaning when the whole prompt was computed.
    repaired_tokens : int
        Chunk tokens recomputed while the answer was written.
    kv_bytes, kv_bytes_before : int
        Bytes of the prompt's KV in the cache, and what they would be without eviction.
    evicted_tokens : int
        Context tokens that each head of an evicted layer dropped.
    kept_reason : str or None
        Why layers were kept whole although eviction was asked for.
    attention : callable or None
        Returns the share of the answer's attention that went to a chunk, where that is asked for.
    batch_size : int
        Prompts that were decoded together, this one included.
    alone_reason : str or None
        Why it was decoded alone although others were asked with it.
    output_ids : tuple of int
        What was generated.
    """

    recomputed: torch.Tensor | None = None
    charge: float = 0.0
    repaired_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_before: int = 0
    evicted_tokens: int = 0
    kept_reason: str | None = None
    attention: Callable[[ChunkSpan], float] | None = None
    batch_size: int = 1
    alone_reason: str | None = None
    output_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class PromptRun:
    """A request on its way.

    Attributes
    ----------
    request : Request
        What was asked.
    prompt : AssembledPrompt
        The prompt as it is answered: of chunks that would keep it waiting, some are text by then.
    plan : Plan or None
        What is done, once that is decided.
    resumed : Resumption or None
        What it takes over: its fixed head, and what its conversation has.
    head : KVReader or None
        The KV of the rows of its fixed head that it takes over.
    kv : ChunkSupply
        Where the KV of its chunks comes from.
    timings : Timings
        What it took.
    outcome : Outcome
        What came of it.
    """

    request: Request
    prompt: AssembledPrompt
    plan: Plan | None = None
    resumed: Resumption | None = None
    head: KVReader | None = None
    kv: ChunkSupply = field(default_factory=ChunkSupply)
    timings: Timings = field(default_factory=Timings)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def layout(self) -> PromptLayout:
        """The prompt as it is computed."""
        return self.prompt.layout if self.resumed is None else self.resumed.layout
