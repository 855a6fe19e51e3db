"""Costs by formula, where nothing was measured: from a model's size and a device's data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_lab.cluster.costs import Costs, TierCost
from cacheblend_rag.errors import ConfigError

__all__ = ["Hardware", "assume_costs"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A model on a device, as data sheets say, and what share of that is believed.

    Attributes
    ----------
    name : str
        Its name in tables.
    parameters : float
        Weights of the model that a token goes through.
    weight_bytes : float
        Bytes of each.
    kv_bytes_per_token : float
        Bytes of KV of a token in the device's memory, all layers.
    stored_share : float
        Bytes that are stored over those: the codec's.
    flops_per_s, memory_bytes_per_s : float
        Of the device.
    compute_share, memory_share : float
        What is had of them.
    ram_bytes_per_s, disk_bytes_per_s, remote_bytes_per_s : float
        From host memory to the device, from the node's disks, and from the network, for one replica.
    remote_read_s : float
        Seconds until a chunk's first byte comes from the remote tier.
    answers_at_once : int
        Maximum answers decoded together.
    """

    name: str
    parameters: float
    kv_bytes_per_token: float
    flops_per_s: float
    memory_bytes_per_s: float
    ram_bytes_per_s: float
    disk_bytes_per_s: float
    remote_bytes_per_s: float
    remote_read_s: float
    compute_share: float
    memory_share: float
    stored_share: float = 1.0
    weight_bytes: float = 2.0
    disk_read_s: float = 100e-6
    answers_at_once: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "name" and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be above 0 and finite")


def assume_costs(hardware: Hardware, prompt_tokens: int) -> Costs:
    """Return costs by formula; nothing in them was measured, and their `source` says so.

    A computed token takes ``2 x parameters / (flops_per_s x compute_share)``. A step of decoding reads all weights once,
    ``parameters x weight_bytes / (memory_bytes_per_s x memory_share)``, and each answer its own KV,
    ``prompt_tokens x kv_bytes_per_token`` over the same. A reused token is written and read once at that bandwidth. Loading
    hides behind computing in full.
    """
    memory = hardware.memory_bytes_per_s * hardware.memory_share
    step_s = hardware.parameters * hardware.weight_bytes / memory
    return Costs(
        name=hardware.name,
        source=f"assumed, by formula, nothing measured: {hardware}",
        stored_bytes_per_token=hardware.kv_bytes_per_token * hardware.stored_share,
        # However few tokens are computed, all weights are read.
        prefill_s_per_request=step_s,
        prefill_s_per_token=2 * hardware.parameters / (hardware.flops_per_s * hardware.compute_share),
        reuse_s_per_token=2 * hardware.kv_bytes_per_token / memory,
        decode_s_per_step=step_s,
        decode_s_per_answer_step=prompt_tokens * hardware.kv_bytes_per_token / memory,
        overlap=1.0,
        answers_at_once=hardware.answers_at_once,
        joins_midway=True,
        ram=TierCost(0.0, hardware.ram_bytes_per_s),
        disk=TierCost(hardware.disk_read_s, hardware.disk_bytes_per_s),
        remote=TierCost(hardware.remote_read_s, hardware.remote_bytes_per_s),
    )
