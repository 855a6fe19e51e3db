"""The settings of a server, besides those of its engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from cacheblend_rag.config import SettingsBase

__all__ = ["LOOPBACK", "ServeConfig"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Names by which every machine reaches itself, and no other machine."""


class ServeConfig(SettingsBase):
    """Settings of a server, fixed when it starts.

    Every field can also be set by an environment variable, its name in capitals after ``CACHEBLEND_SERVE_``.

    Parameters
    ----------
    host, port : str, int
        Where it listens; port 0 is any that is free.
    keys : Path, optional
        The file of API keys (`cacheblend-rag keys add`). Without one all requests are let in, so the host must be this machine.
    requests : int
        Most requests that are answered at the same time, each prompt of a completion counting as one; further ones are told to
        come again (status 503).
    per_minute : int, optional
        Most requests of a key in a minute, unless the key has a number of its own; further ones are told when to come again
        (429). By default no limit.
    body_bytes : int
        Most bytes of a request.
    body_s : float
        Seconds in which a request must have arrived (408).
    prompt_tokens : int, optional
        Most tokens of a prompt; by default as many as the model's window holds.
    output_tokens : int
        Most tokens of an answer.
    timeout_s : float
        Seconds after which an answer ends with an error (504), the wait for the model included.
    drain_s : float
        Seconds that answers may still take once the server was told to stop.
    compare_every : int, optional
        One answer in so many is compared with full prefill, in the background (`CompareAnswers`); by default none.
    """

    model_config = SettingsConfigDict(
        env_prefix="CACHEBLEND_SERVE_", extra="forbid", frozen=True, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    keys: Path | None = None
    requests: int = Field(default=64, ge=1)
    per_minute: int | None = Field(default=None, ge=1)
    body_bytes: int = Field(default=8_000_000, ge=1)
    body_s: float = Field(default=60.0, gt=0)
    prompt_tokens: int | None = Field(default=None, ge=1)
    output_tokens: int = Field(default=4096, ge=1)
    timeout_s: float = Field(default=300.0, gt=0)
    drain_s: float = Field(default=30.0, ge=0)
    compare_every: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _keys_if_others_can_ask(self) -> ServeConfig:
        if self.keys is None and self.host not in LOOPBACK:
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, so the server needs keys; give a file of keys "
                "(cacheblend-rag keys add FILE --tenant NAME), or listen on 127.0.0.1"
            )
        return self
