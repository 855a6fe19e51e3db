"""Costs of one replica's work: the figures that the simulator is fed with, and those that this project has measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from cacheblend_rag.errors import ConfigError

__all__ = ["CASES", "TIERS", "Costs", "Reads", "TierCost", "costs_of", "read_costs"]

TIERS = ("ram", "disk", "remote")
"""Tiers that may hold KV, the nearest first; the first two are a replica's own."""

# Most tokens of a companion, and those of its own document, that a chunk is read behind.
_COMPANION_TOKENS, _ENDING_TOKENS = 256, 64

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class TierCost:
    """Reading chunks' KV from a tier.

    Attributes
    ----------
    read_s : float
        Seconds a chunk, whatever its size.
    load_bytes_per_s : float
        Bytes a second after that; infinity where reading was measured per chunk as a whole.
    beside_s : float
        Seconds of a core that a read takes from others while the replica goes on: copying what was far to the own disk.
    first_s : float
        Seconds of a request that reads any chunk there, beside those of its chunks: look-ups, and what the first is waited for.
    """

    read_s: Seconds = 0.0
    load_bytes_per_s: Rate = float("inf")
    beside_s: Seconds = 0.0
    first_s: Seconds = 0.0

    def seconds(self, chunks: int, chunk_bytes: float) -> float:
        """Return the seconds of reading a number of chunks of one size for one request."""
        first_s = self.first_s if chunks else 0.0
        return first_s + chunks * (self.read_s + chunk_bytes / self.load_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Reads:
    """Tiers in which the chunks of one request were found; `missing` ones are in no tier, and are computed."""

    ram: int = 0
    disk: int = 0
    remote: int = 0
    missing: int = 0

    @property
    def near(self) -> int:
        """Chunks in the replica's own tiers."""
        return self.ram + self.disk

    @property
    def chunks(self) -> int:
        """All of them."""
        return self.ram + self.disk + self.remote + self.missing


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one replica, a model on its device.

    Attributes
    ----------
    name, source : str
        What was measured or assumed, and where every figure is from.
    stored_bytes_per_token : float
        Bytes of KV of one token as they are stored and moved.
    prefill_s_per_request, prefill_s_per_token : float
        Seconds of prefill a prompt, and a token that is computed.
    reuse_s_per_token : float
        Seconds a token whose KV is reused, from RAM: to move it to its position and to attend to it.
    decode_s_per_step : float
        Seconds of a step of decoding, however many answers are written in it.
    decode_s_per_answer_step : float
        Seconds that each answer adds to a step.
    beside_s_per_request : float
        Seconds of a core that a request takes from others without the replica's model: HTTP, tokenising, the client where it is
        on the same machine.
    overlap : float
        Share of the loading that hides behind computing where there is enough of that.
    busy_share : float
        Share of the replica's time in which it has a core busy; counts where cores are shared.
    answers_at_once : int
        Maximum answers decoded together.
    joins_midway : bool
        Whether requests join answers that are being written (vLLM); else those that wait are answered together next.
    ram, disk, remote : TierCost
        The tiers.
    """

    name: str
    source: str
    stored_bytes_per_token: Rate
    prefill_s_per_request: Seconds
    prefill_s_per_token: Seconds
    reuse_s_per_token: Seconds
    decode_s_per_step: Seconds
    decode_s_per_answer_step: Seconds
    beside_s_per_request: Seconds = 0.0
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    busy_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    answers_at_once: Annotated[int, Field(ge=1)] = 64
    joins_midway: bool = False
    ram: TierCost = field(default_factory=TierCost)
    disk: TierCost = field(default_factory=TierCost)
    remote: TierCost = field(default_factory=TierCost)

    def prefill_s(self, reads: Reads, chunk_tokens: int, question_tokens: int) -> float:
        """Return the seconds from when the replica takes a request up to its first token.

        A missing chunk is read once more, behind a companion as long as itself and the end of its document.
        """
        chunk_bytes = chunk_tokens * self.stored_bytes_per_token
        load_s = (
            self.ram.seconds(reads.ram, chunk_bytes)
            + self.disk.seconds(reads.disk, chunk_bytes)
            + self.remote.seconds(reads.remote, chunk_bytes)
        )
        compute_s = self.prefill_s_per_token * question_tokens + self.reuse_s_per_token * chunk_tokens * reads.chunks
        hidden_s = self.overlap * min(load_s, compute_s)
        miss_tokens = chunk_tokens + min(chunk_tokens, _COMPANION_TOKENS) + _ENDING_TOKENS
        encode_s = self.prefill_s_per_token * miss_tokens * reads.missing
        return self.prefill_s_per_request + compute_s + load_s - hidden_s + encode_s

    def decode_s(self, answers: int, steps: int) -> float:
        """Return the seconds of `steps` steps that decode `answers` answers together."""
        return steps * (self.decode_s_per_step + answers * self.decode_s_per_answer_step)

    def beside_s(self, reads: Reads) -> float:
        """Return the seconds of a core that a request takes beside the replica's model."""
        return (
            self.beside_s_per_request
            + self.ram.beside_s * reads.ram
            + self.disk.beside_s * reads.disk
            + self.remote.beside_s * reads.remote
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as `read_costs` reads them; what is infinite is left out, as it is by default."""
        figures = asdict(self)
        for tier in TIERS:
            if figures[tier]["load_bytes_per_s"] == float("inf"):
                del figures[tier]["load_bytes_per_s"]
        return figures


def read_costs(path: Path) -> Costs:
    """Return the costs in a JSON file, as `bench cluster measure` and `bench cluster assume` write them."""
    try:
        return TypeAdapter(Costs).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise ConfigError(
            f"{path} holds no costs ({where}: {found['msg']}); write them with `cacheblend-rag bench cluster assume`"
        ) from error


# A case that this project has measured, as its figures in docs/results say; not of a GPU.
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
