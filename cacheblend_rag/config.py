"""The settings of an engine, fixed when it is made, and of blending, which each call may change; constants of an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import Repr
from textwrap import shorten
from typing import Any, ClassVar, Literal, TypeVar

import torch
import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cacheblend_rag.errors import ConfigError

__all__ = [
    "BlendConfig",
    "EngineConfig",
    "SettingsBase",
    "Tuning",
    "did_you_mean",
    "usable_cores",
    "warn_of_unknown_variables",
]

_Codec = Literal["native", "int8", "int4"]
_PREFIX = "CACHEBLEND_"
# Settings that a distribution has which may not be imported yet; it sees to them itself.
_ELSEWHERE = "CACHEBLEND_GGUF_"
SERVER_KEY_VARIABLE = "CACHEBLEND_SERVER_KEY"
"""The environment variable that has the key of the servers that are asked."""
# Of a message, however long the values that it speaks of.
_PROBLEMS_SHOWN = 5
_NAME_SHOWN = 60
_REASON_SHOWN = 300
_shown = Repr()
_shown.maxstring = _shown.maxother = 100
_log = logging.getLogger(__name__)
_Settings = TypeVar("_Settings", bound="SettingsBase")


class SettingsBase(BaseSettings):
    """Base of all kinds of settings; frozen, and an unknown name is an error."""

    # A message shows the inputs that may be seen; pydantic's own, in a traceback, would show all of them.
    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    kinds: ClassVar[dict[str, type[SettingsBase]]] = {}
    """The class that has each setting, by the setting's name."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from error
        except SettingsError as error:
            raise ConfigError(f"{error}; in the environment, lists are written as JSON, as in [1,2]") from error

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.kinds.update(dict.fromkeys(cls.model_fields, cls))

    @classmethod
    def of(cls: type[_Settings], given: Any) -> _Settings:
        """Return settings as they were given, or those of the environment for None; `ConfigError` if they are of another type."""
        if given is None:
            return cls()
        if not isinstance(given, cls):
            raise ConfigError(f"expected {cls.__name__}, not the {type(given).__name__} {given!r:.40}")
        return given

    @classmethod
    def from_yaml(cls: type[_Settings], path: str | Path, **changes: Any) -> _Settings:
        """Read the settings from a YAML file; the environment fills what the file leaves out.

        One file may hold all kinds of settings; those of the other kinds are ignored.

        Parameters
        ----------
        path : str or Path
            A file that holds one mapping of names to values.
        **changes : Any
            Settings that take precedence over the file's.

        Raises
        ------
        ConfigError
            If the file cannot be read, is not a mapping, or holds a name or a value that is not a setting.
        """
        try:
            values = yaml.safe_load(Path(path).read_bytes().decode())
        except Exception as error:  # PyYAML raises what it meets: values that are not what their tags say
            raise ConfigError(f"settings file {path} cannot be read: {shorten(str(error), _REASON_SHOWN)}") from None
        values = {} if values is None else values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"settings file {path} holds a {type(values).__name__}; it must be a mapping of names to values"
            )
        return cls.from_mapping({**values, **changes})

    @classmethod
    def from_mapping(cls: type[_Settings], values: Mapping[Any, Any]) -> _Settings:
        """Take the settings of this kind from a mapping that may hold those of both; see `from_yaml`."""
        named = {str(name): value for name, value in values.items()}
        return cls(**{name: value for name, value in named.items() if cls.kinds.get(name, cls) is cls})

    def replace(self: _Settings, **changes: Any) -> _Settings:
        """Return a copy with some settings changed, all checked again; `ConfigError` for an unknown name or an invalid value."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        replaced = type(self)(**(given | changes))
        # What was not set is still not set: an engine may have settled it in its own way.
        replaced.__pydantic_fields_set__ = self.model_fields_set | changes.keys()
        return replaced

    def over(self: _Settings, base: _Settings) -> _Settings:
        """Return `base` with what is set here."""
        return base.replace(**{name: getattr(self, name) for name in self.model_fields_set})

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        problems = []
        for item in error.errors()[:_PROBLEMS_SHOWN]:
            name = ".".join(str(part) for part in item["loc"])[:_NAME_SHOWN] or "settings"
            if item["type"] != "extra_forbidden":
                message = item["msg"].removeprefix("Value error, ")
                # The address of a remote tier may hold a password, and so may all settings together.
                shown = "" if name in ("settings", "remote", "names") else f"={_shown.repr(item.get('input'))}"
                problems.append(f"{name}{shown}: {message}")
            elif (other := cls.kinds.get(name)) is not None:
                problems.append(f"{name} is a setting of {other.__name__}; give it in {other.__name__}({name}=...)")
            else:
                known = ", ".join(sorted(cls.model_fields))
                problems.append(f"unknown setting {name}{did_you_mean(name, cls.kinds)}; {cls.__name__} has {known}")
        return "; ".join(problems)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name, or nothing if no known name is similar."""
    close = get_close_matches(name, list(known), 1)
    return f", did you mean {close[0]}?" if close else ""


@cache
def _warn_of(variable: str) -> None:
    name = variable.removeprefix(_PREFIX).lower()
    _log.warning(
        "unknown setting %s in the environment%s; it is ignored", variable, did_you_mean(name, SettingsBase.kinds)
    )


def warn_of_unknown_variables(prefix: str = _PREFIX) -> None:
    """Warn once of each environment variable that looks like a setting but is not one."""
    known = {f"{kind.model_config['env_prefix']}{name}".upper() for name, kind in SettingsBase.kinds.items()}
    known.add(SERVER_KEY_VARIABLE)
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(prefix) and name.startswith(_ELSEWHERE) == (prefix != _PREFIX) and name not in known:
            _warn_of(variable)


class EngineConfig(SettingsBase):
    """Settings of an engine, fixed when it is created.

    Every field can also be set by an environment variable, its name in capitals after ``CACHEBLEND_``, as in
    ``CACHEBLEND_RAM_BYTES=1000000000``, or read from a YAML file by `from_yaml`. An argument wins over the environment.

    Parameters
    ----------
    device : str, optional
        Where a model is loaded, "cpu" or "cuda:0" for example; by default CUDA if there is one, else the CPU.
    dtype : {"float32", "float16", "bfloat16"}, optional
        The dtype a model is loaded in; by default the checkpoint's own, but on a CPU without units for it float32.
    strict : bool
        Whether a model that cannot be blended is an error; by default its prompts are prefilled in full and the
        report says why.
    preamble : str or tuple of int, optional
        What precedes every chunk when it is encoded, as text or token ids; "" is the tokenizer's BOS alone. By default the
        beginning of the tokenizer's chat template and an instruction; the BOS if the model's KV cannot be moved.
    companions : {"own", "similar", "neutral"}
        What a chunk is read behind for its KV to serve it behind other chunks of a prompt: "own", two passages that the package
        brings, of the same kind of text, another chunk of its document, and the end of what precedes it there; "similar", the
        same with the most similar chunk of all instead of the document's, for a corpus that every reader may read whole;
        "neutral", the passages alone, for documents of which some readers may see only some chunks.
    separator : str
        The text between chunks, in prompts and in what they are read behind. Its KV is kept with each chunk, and used if a prompt
        has exactly this text after the chunk.
    tenant : str, optional
        Who owns the KV. Tenants of one store never see each other's KV or ids; by default it belongs to no tenant.
    ram_bytes : int
        Maximum bytes of KV that the RAM tier holds.
    disk_bytes : int, optional
        Maximum bytes of KV that the disk tier holds; by default half of the disk's free space at any time, counting the tier's
        own KV as free.
    ram_codec : str
        How KV is kept in RAM: "native" (in the model's dtype), "int8" or "int4".
    disk_codec : str
        How KV is written to disk; RAM then holds what the disk gives back. "native" loses nothing; the default takes 8 bits, with
        which answers are as good. KV that is already stored is used whatever its codec.
    remote : str, optional
        The URL of a remote tier below RAM and disk: Redis, Valkey, or the folder of an fsspec filesystem
        (``redis://host:6379/0``, ``s3://bucket/prefix``). It gets a copy of stored KV and keeps it when it is evicted
        here; machines that share it share the KV. The
        attribute is a pydantic `SecretStr`: no dump of the settings shows a password in it.
    names : str, optional
        The URL of a database in which machines share ids (``postgresql+psycopg://user@host/database``, or on one machine
        ``sqlite:////folder/names.sqlite``): all with the same URL have the same chunk ids, documents and deletions. By default
        each folder has its own. A `SecretStr` too.
    prefix_bytes : int
        Maximum bytes of KV that all engines over a model keep of their last prompts and answers, in the memory in which it
        computes: what the next prompt begins with as they do is not computed again. 0 keeps none.

    Raises
    ------
    ConfigError
        If a name is unknown or a value is invalid.
    """

    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    strict: bool = False
    preamble: str | tuple[int, ...] | None = None
    companions: Literal["own", "similar", "neutral"] = "own"
    separator: str = ""
    tenant: str | None = None
    ram_bytes: int = Field(default=4 * 1024**3, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    ram_codec: _Codec = "native"
    disk_codec: _Codec = "int8"
    remote: SecretStr | None = None
    names: SecretStr | None = None
    prefix_bytes: int = Field(default=1024**3, ge=0)

    def __init__(self, **values: Any) -> None:
        # Here, since calls make settings of blending again and again.
        warn_of_unknown_variables()
        super().__init__(**values)

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, device: str | None) -> str | None:
        try:
            torch.device(device or "cpu")
        except RuntimeError:
            raise ValueError("unknown device; give cpu, cuda or cuda:N") from None
        return device

    @field_validator("tenant")
    @classmethod
    def _tenant_is_a_name(cls, tenant: str | None) -> str | None:
        if tenant is not None and (not 0 < len(tenant) <= 200 or not tenant.isprintable()):
            raise ValueError("must be a name of 1 to 200 printable characters, or None")
        return tenant

    @property
    def names_url(self) -> str | None:
        """The address of shared names, with its password; None where there are none."""
        return None if self.names is None else self.names.get_secret_value()

    def torch_dtype(self) -> torch.dtype | None:
        """Return `dtype` as torch names it, or None."""
        return None if self.dtype is None else getattr(torch, self.dtype)


class BlendConfig(SettingsBase):
    """Settings of blending: whether, how much, and which tokens. An engine has its own, and each call may override them.

    Every field can also be set by an environment variable, its name in capitals after ``CACHEBLEND_``, as in
    ``CACHEBLEND_RECOMPUTE_RATIO=0.2``, or read from a YAML file by `from_yaml`. An argument wins over the environment.

    Parameters
    ----------
    enabled : bool
        False prefills every prompt in full.
    recompute_ratio : float
        Share of the chunk tokens to recompute, 0 (plain reuse) to 1 (full prefill). For chunks that have met no other, CacheBlend
        (section 7) finds 0.15 enough.
    selector : str
        Which tokens to recompute: "boundary", "hkvd", "a3", "random", or any registered selector, with
        options after the name as in ``"hkvd(check_layers=[1, 8])"``.

    Raises
    ------
    ConfigError
        If a name is unknown or a value is invalid. What depends on the model (the selector, layers) is checked when an engine
        is created.
    """

    enabled: bool = True
    recompute_ratio: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    selector: str = "boundary"

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        # What the environment sets was not asked for by the call that these settings are for.
        self.__pydantic_fields_set__ = set(values)

    @property
    def is_full(self) -> bool:
        """Whether all of a prompt is computed, whatever is stored of it."""
        return not self.enabled or self.recompute_ratio == 1


def usable_cores() -> int:
    """Return how many cores this thread, and those that it starts, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of an engine, of which each has one good value; tests and benchmarks change them for comparisons."""

    # Most tokens that are encoded in one batch, padding included.
    encode_batch_tokens: int = 4096
    # Most tokens of KV, padding and room for the answers included, with which prompts are decoded together.
    decode_batch_tokens: int = 32_768
    # Most tokens that are guessed from the prompt and computed with an answer's next one.
    lookup_tokens: int = 15
    # Layers that the loader may be ahead of the computation.
    prefetch_layers: int = 2
    # Threads that read, check and decode stored KV meanwhile; by default one for every two cores, at most 4.
    load_threads: int = field(default_factory=lambda: max(1, min(4, usable_cores() // 2)))
    # Whether the RAM tier's memory is page-locked; by default if the model is on a CUDA device.
    page_locked: bool | None = None
    # Whether a new engine verifies blending on its model with random tokens, which takes a few small forward passes.
    self_check: bool = True
