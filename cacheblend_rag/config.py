"""The settings of a blending engine."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cacheblend_rag.errors import ConfigError

__all__ = ["BlendConfig"]

_Codec = Literal["native", "float32", "float16", "bfloat16", "int8", "int4", "int2"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class BlendConfig(BaseSettings):
    """Settings of a `BlendEngine`; frozen, and an unknown name is an error.

    Every field can also be set by an environment variable of its name in capitals behind ``CACHEBLEND_``, as in
    ``CACHEBLEND_RECOMPUTE_RATIO=0.2``, or read from a YAML file by `from_yaml`. An argument wins over the environment.

    Parameters
    ----------
    enabled : bool
        False prefills every prompt as a whole.
    recompute_ratio : float or "auto"
        Share of the chunk tokens to recompute, 0 (plain reuse) to 1 (full prefill of the chunks). Chunks that remember their
        documents need none: a recomputed token forgets its document and sees the prompt instead. For chunks that were encoded
        alone CacheBlend (section 7) finds 0.15 enough. "auto" lets the controller choose for each prompt, from what it measured
        of this machine: the largest ratio that adds no delay, never under `quality_ratio`, or full prefill where that is no
        slower; 0 where chunks remember.
    quality_ratio : float
        The smallest ratio that "auto" chooses where no chunk remembers its document, r* in CacheBlend (section 5).
    selector : str
        Which tokens to recompute: "hkvd", "query", "a3", "boundary", "random", "none", "full", any that was registered, or
        "auto", which is "hkvd".
    check_layers : tuple of int
        Layers at which hkvd compares fresh KV with stored KV, ascending. Layer 0 measures nothing, since its KV depends
        on no other token.
    deviation : {"value", "key", "both"}
        What hkvd compares.
    gradual_start : float
        Gradual filtering (CacheBlend, section 4.3): the first check layer keeps this many times the average ratio,
        later ones fewer, so that `recompute_ratio` is the average from the first check layer on. Without effect with
        one check layer.
    ratio_schedule : tuple of float, optional
        The multiple of `recompute_ratio` that each check layer keeps, never rising, instead of the linear schedule that
        `gradual_start` gives.
    segment_tokens : int, optional
        Tokens of a chunk that are chosen together, at most; 1 chooses each token for itself. By default what suits the selector,
        and 32 for decode-time repair. Without effect on random and boundary.
    boundary : {"first", "both"}
        Whether the boundary selector takes the first tokens of each chunk, or the last ones as well.
    look_layers : tuple of int, optional
        Layers in which query looks at what the prompt's last token attends to, and decode-time repair at the
        answer's tokens, ascending; by default those from a quarter to three quarters of the depth.
    stop_layer : int, optional
        The layer from which on query and decode-time repair recompute nothing any more, so that more tokens can be recomputed
        before it; by default two thirds of the depth. As many as the model has layers recomputes in all of
        them. Without effect on other selectors.
    repair_ratio : float
        Most work that decode-time repair may do while one answer is written, as a share of what recomputing all chunk tokens
        would take. 0, the default, repairs nothing.
    repair_limit : float
        The share of a step's attention that must go to a stale segment for it to be repaired.
    source_attention : bool
        Whether the report says how much of the answer's attention went to each chunk, in `look_layers`. It is computed a second
        time for that, one row for each token of the answer. Not said where KV is evicted.
    min_tokens : int
        Prompts with fewer chunk tokens than this are prefilled as a whole.
    kv_capacity : int or float, optional
        How much KV of the context each layer and head keeps for decoding (SnapKV): an integer is a number of tokens, a float a
        share of the context, above 0 and at most 1. The context reaches from the first chunk to the last; what stands before and
        behind it is always kept. By default nothing is evicted.
    observation_window : int
        The last tokens of the prompt, behind the last chunk, whose attention says which context tokens are kept.
    pooling_kernel : int
        Over how many neighbouring tokens that attention is pooled (their maximum), so that words are kept with what surrounds
        them; odd, and 1 pools nothing.
    encoding_prefix : str or tuple of int, optional
        What every chunk is encoded behind, as text or token ids; by default the tokenizer's BOS alone.
    dtype : {"float32", "float16", "bfloat16"}, optional
        The dtype a model is loaded in; by default float32 on the CPU and the checkpoint's own elsewhere.
    device : str, optional
        Where a model is loaded, "cpu" or "cuda:0" for example; by default CUDA if there is one, else the CPU.
    device_bytes : int, optional
        Most bytes of KV that stays unpacked in the memory of the device that computes it, of all devices together where a model
        is spread over several. Blending takes it from there without loading. By default 0 on the CPU, where RAM is that memory
        already, and elsewhere an eighth of what is free when the engine is made.
    ram_bytes : int
        Most bytes of KV that the RAM tier holds.
    disk_bytes : int, optional
        Most bytes of KV that the disk tier holds; no limit by default.
    ram_codec : str
        How KV is kept in RAM: "native" (in the model's dtype), "float32", "float16", "bfloat16", "int8", "int4" or "int2".
    page_locked : bool, optional
        Whether the RAM tier's memory is page-locked, so that a CUDA device copies from it without the processor; by default where
        the model is on one.
    disk_codec : str
        How KV is written to disk. KV that is stored already is served whatever its codec.
    remote : str, optional
        The URL of a remote tier below RAM and disk: Redis, Valkey, or the folder of an fsspec filesystem
        (``redis://host:6379/0``, ``s3://bucket/prefix``). It gets a copy of what is stored and keeps it when there is no more
        room here; machines that share it share the KV.
    write_back_bytes : int
        Most bytes of KV of misses that wait in RAM, beside `ram_bytes`, to be written to disk in the background. A miss that
        finds no room is not stored. With 0 an answer waits for its misses to be written.
    namespace : str, optional
        The tenant whose KV this is. Tenants of one store never see each other's KV or ids; by default it is nobody's in
        particular.
    ttl_s : float, optional
        Seconds that stored KV lives; then it counts as a miss. For ever by default.
    conversation_bytes : int
        Most bytes of KV that all conversations of an engine together keep from turn to turn, in the memory in which the model
        computes; what was not used for longest is forgotten first.
    encode_batch_tokens : int
        Most tokens encoded in one batch, padding included.
    encode_on : {"add", "second_use"}
        When chunks are encoded: when they are added, or when they are retrieved the second time. Chunks retrieved the first time
        are then computed like text, and nothing of them is stored. What was retrieved once is remembered by this process only.
    decode_batch_tokens : int
        Most tokens of KV, padding and room for the answers included, that prompts of one call decode together with
        (`BlendEngine.generate_many`); more prompts are decoded batch after batch.
    context : {"document", "none"}
        Whether a chunk that is a piece of a document is encoded behind the chunks before it there, so that its KV remembers them,
        or every chunk alone. "none" is for texts whose readers differ from chunk to chunk.
    context_tokens : int, optional
        Most tokens of a document that are read together, a chunk and its context; a longer document is read in windows that
        begin at chunk borders. None is as many as the model takes.
    separator : str
        What stands between the chunks of a document, and most likely between the chunks of a prompt. Behind each chunk its KV is
        kept too, and used where a prompt has just this there.
    miss_tokens : int
        Most tokens that an answer waits for while chunks without stored KV are encoded in their documents. Chunks beyond that are
        computed like text for this answer, and encoded in the background.
    prefetch_layers : int
        Layers that the loader may be ahead of the computation.
    load_threads : int
        Threads that read, check and decode stored KV beside the computation; by default one for every two cores, at
        most 4.
    reposition : bool
        False leaves stored keys at the positions that they were encoded at (FullReuse in A3, section 5); for comparison, since
        the answers are worse.
    pipeline : bool
        False loads every layer only when it is asked for, in the thread of the computation, one read after the other;
        for comparison.
    profile_path : Path, optional
        The file in which "auto" keeps what it measured; by default one in the folder of the store, or in the user's cache
        directory where there is none.
    profile_budget_s : float
        About how long "auto" may measure when it is first used and finds no such file; 0 never measures, and takes
        `quality_ratio` throughout.
    guard_rate : float
        Share of the answers that are compared with full prefill in the background, when the model is idle; 0, the default,
        compares none and costs nothing.
    guard_limit : float
        The average distance of the compared answers from full prefill's past which the guard acts, 0 (all the same) to 1.
    guard_window : int
        How many compared answers that average is taken over; the guard acts when there are as many, and then begins anew.
    guard_action : {"report", "raise", "full"}
        What it does past the limit: log a warning; raise the ratio step by step, up to full prefill; or prefill every prompt
        as a whole from then on.
    self_check : bool
        Whether a new engine verifies blending on its model with random tokens, which takes a few small forward passes.
    strict : bool
        Whether a model that cannot be blended is an error; by default its prompts are prefilled as a whole and the
        report says why.
    seed : int
        Seed of the random selector, and of what the guard draws.

    Raises
    ------
    ConfigError
        If a name is unknown or a value has no meaning. What depends on the model (the selector, layers) is checked when an engine
        is made.
    """

    model_config = SettingsConfigDict(env_prefix="CACHEBLEND_", extra="forbid", frozen=True)

    enabled: bool = True
    recompute_ratio: float | Literal["auto"] = 0.0
    quality_ratio: float = 0.15
    selector: str = "auto"
    check_layers: tuple[int, ...] = (1,)
    deviation: Literal["value", "key", "both"] = "value"
    gradual_start: float = Field(default=1.5, ge=1.0, allow_inf_nan=False)
    ratio_schedule: tuple[float, ...] | None = None
    segment_tokens: int | None = Field(default=None, ge=1)
    boundary: Literal["first", "both"] = "first"
    look_layers: tuple[int, ...] | None = None
    stop_layer: int | None = Field(default=None, ge=1)
    repair_ratio: float = 0.0
    repair_limit: float = Field(default=0.05, ge=0, le=1, allow_inf_nan=False)
    source_attention: bool = False
    min_tokens: int = Field(default=0, ge=0)
    kv_capacity: int | float | None = None
    observation_window: int = Field(default=32, ge=1)
    pooling_kernel: int = Field(default=7, ge=1)
    encoding_prefix: str | tuple[int, ...] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    device: str | None = None
    device_bytes: int | None = Field(default=None, ge=0)
    ram_bytes: int = Field(default=4 * 1024**3, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    ram_codec: _Codec = "native"
    page_locked: bool | None = None
    disk_codec: _Codec = "native"
    remote: str | None = Field(default=None, repr=False)
    write_back_bytes: int = Field(default=256 * 1024**2, ge=0)
    namespace: str | None = None
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    conversation_bytes: int = Field(default=1024**3, ge=0)
    encode_batch_tokens: int = Field(default=4096, ge=1)
    encode_on: Literal["add", "second_use"] = "add"
    context: Literal["document", "none"] = "document"
    context_tokens: int | None = Field(default=8192, ge=1)
    separator: str = ""
    miss_tokens: int = Field(default=16_384, ge=0)
    decode_batch_tokens: int = Field(default=32_768, ge=1)
    prefetch_layers: int = Field(default=2, ge=1)
    load_threads: int = Field(default_factory=lambda: max(1, min(4, _cores() // 2)), ge=1)
    reposition: bool = True
    pipeline: bool = True
    profile_path: Path | None = None
    profile_budget_s: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    guard_rate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    guard_limit: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    guard_window: int = Field(default=20, ge=1)
    guard_action: Literal["report", "raise", "full"] = "report"
    self_check: bool = True
    strict: bool = False
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error
        except SettingsError as error:
            raise ConfigError(f"{error}; in the environment, lists are written as JSON, as in [1,2]") from error

    @classmethod
    def of(cls, config: Any) -> BlendConfig:
        """Return settings as they were given; where that is None, those of the environment.

        Raises
        ------
        ConfigError
            If they are not a `BlendConfig`.
        """
        if config is None:
            return cls()
        if not isinstance(config, BlendConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; give a BlendConfig, as in config=BlendConfig(recompute_ratio=0.3)"
            )
        return config

    @field_validator("recompute_ratio", mode="before")
    @classmethod
    def _ratio_or_auto(cls, ratio: Any) -> Any:
        # Read here, since a union would report each of its members for one mistake.
        if ratio == "auto":
            return ratio
        try:
            number = float(ratio)
        except (TypeError, ValueError):
            raise ValueError('must be a number from 0 (plain reuse) to 1 (full prefill), or "auto"') from None
        return cls._ratio_in_range(number)

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, device: str | None) -> str | None:
        try:
            torch.device(device or "cpu")
        except RuntimeError:
            raise ValueError("is no device; give cpu, cuda or cuda:N") from None
        return device

    @field_validator("repair_ratio")
    @classmethod
    def _repair_in_range(cls, ratio: float) -> float:
        if not math.isfinite(ratio) or not 0 <= ratio <= 1:
            raise ValueError("must be a finite number from 0 (repairs nothing) to 1")
        return ratio

    @field_validator("quality_ratio")
    @classmethod
    def _ratio_in_range(cls, ratio: float) -> float:
        if not math.isfinite(ratio) or not 0 <= ratio <= 1:
            raise ValueError("must be a finite number from 0 (plain reuse) to 1 (full prefill)")
        return ratio

    @field_validator("kv_capacity", mode="before")
    @classmethod
    def _capacity_is_tokens_or_share(cls, capacity: Any) -> Any:
        if capacity is None:
            return None
        number: Any = capacity
        if isinstance(number, str):
            # From the environment: "512" is a number of tokens, "0.25" a share.
            with suppress(ValueError):
                number = float(number)
                number = int(capacity)
        if type(number) is int and number >= 1:
            return number
        if type(number) is float and 0 < number <= 1:
            return number
        raise ValueError(
            "must be a number of tokens (an integer from 1) or a share of the context (a float above 0 and at most 1.0); None "
            "keeps all"
        )

    @field_validator("pooling_kernel")
    @classmethod
    def _kernel_is_odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError("must be odd, so that a token stands in the middle of its neighbours")
        return kernel

    @field_validator("namespace")
    @classmethod
    def _tenant_is_a_name(cls, namespace: str | None) -> str | None:
        if namespace is not None and (not 0 < len(namespace) <= 200 or not namespace.isprintable()):
            raise ValueError("must be a name of 1 to 200 printable characters, or None")
        return namespace

    @field_validator("check_layers")
    @classmethod
    def _layers_ascend(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if not layers:
            raise ValueError("must name at least one layer; (1,) is the usual one")
        if layers[0] == 0:
            raise ValueError(
                "holds 0, where nothing can be measured: layer 0's KV depends on no other token; begin with 1"
            )
        if layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
            raise ValueError("must be layer indices in ascending order, each once")
        return layers

    @field_validator("look_layers")
    @classmethod
    def _looks_ascend(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and (not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers))):
            raise ValueError("must be layer indices in ascending order, each once, at least one; or None")
        return layers

    @model_validator(mode="after")
    def _nothing_evicted_is_repaired(self) -> BlendConfig:
        if self.repair_ratio and self.kv_capacity is not None:
            raise ValueError(
                f"repair_ratio={self.repair_ratio} and kv_capacity={self.kv_capacity} exclude each other: what was"
                " evicted cannot be repaired; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> BlendConfig:
        schedule = self.ratio_schedule
        if schedule is None:
            return self
        if len(schedule) != len(self.check_layers):
            raise ValueError(
                f"ratio_schedule has {len(schedule)} numbers for {len(self.check_layers)} check layers; give each one"
            )
        if any(not math.isfinite(f) or f <= 0 for f in schedule) or any(a < b for a, b in pairwise(schedule)):
            raise ValueError(
                f"ratio_schedule {schedule} must be positive and never rise: a check layer chooses among the tokens kept so far"
            )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> BlendConfig:
        """Read the settings from a YAML file; the environment fills what the file leaves out.

        Parameters
        ----------
        path : str or Path
            A file that holds one mapping of field names to values.

        Returns
        -------
        BlendConfig
            The settings.

        Raises
        ------
        ConfigError
            If the file cannot be read, is no mapping, or holds a name or a value that is not a setting.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"settings file {path} cannot be read: {error}") from error
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(
                f"settings file {path} holds a {type(values).__name__}; it must be a mapping of names to values"
            )
        return cls(**{str(name): value for name, value in values.items()})

    def replace(self, **changes: Any) -> BlendConfig:
        """Return a copy with some settings changed, all of them checked again.

        Raises
        ------
        ConfigError
            If a name is unknown or a value has no meaning.
        """
        replaced = BlendConfig(**(self.model_dump() | changes))
        # What nobody set is still not set: an engine may have settled it in its own way.
        replaced.__pydantic_fields_set__ = self.model_fields_set | changes.keys()
        return replaced

    def torch_dtype(self) -> torch.dtype | None:
        """Return `dtype` as torch names it, or None."""
        return None if self.dtype is None else _DTYPES[self.dtype]


def _cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        if item["type"] == "extra_forbidden":
            known = ", ".join(sorted(BlendConfig.model_fields))
            problems.append(f"{name} is no setting; the settings are {known}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            # The address of a remote tier may hold a password, and so may all settings together.
            shown = "" if name in ("settings", "remote") else f"={item.get('input')!r}"
            problems.append(f"{name}{shown}: {message}")
    return "; ".join(problems)
