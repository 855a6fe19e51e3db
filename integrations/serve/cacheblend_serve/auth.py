"""API keys: a file of their digests, and the tenant that each one speaks for."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import replace_text

__all__ = ["OPEN", "KeyFile", "Owner"]

_MARK = "cb-"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True))
class Owner:
    """Owner of a key: whose chunks it sees, what people call it, how often it may ask, and whether it sees all figures."""

    tenant: str | None
    name: str
    per_minute: Annotated[int, Field(ge=1)] | None = None
    is_admin: bool = False
    digest: str = ""


OPEN = Owner(None, "anybody", is_admin=True)
"""Owner of all requests to a server without keys."""

_file: TypeAdapter[dict[Literal["keys"], list[Owner]]] = TypeAdapter(dict[Literal["keys"], list[Owner]])


class KeyFile:
    """The keys of a server, in a JSON file that only holds what a key's digest is; it is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._owners: dict[str, Owner] = {}

    def owner(self, key: str) -> Owner | None:
        """Return the owner of a key, or None; `ConfigError` if the file cannot be read."""
        # A digest of 256 random bits can be looked up: how long that takes says nothing of the key.
        return self._read().get(_digest(key))

    def check(self) -> None:
        """Raise `ConfigError` if the file cannot be read, or holds no key."""
        if not self._read():
            raise ConfigError(
                f"{self._path} holds no key; create one: cacheblend-rag keys add {self._path} --tenant NAME"
            )

    def add(self, owner: Owner) -> str:
        """Make a key, which is told here and never again; `ConfigError` if there is one of that name."""
        key = _MARK + secrets.token_urlsafe(32)
        with self._changing() as owners:
            if any(known.name == owner.name for known in owners):
                raise ConfigError(
                    f"{self._path} has a key called {owner.name!r} already; give another name, or remove that one"
                )
            owners.append(replace(owner, digest=_digest(key)))
        return key

    def remove(self, name: str) -> None:
        """Take a key back by its name; servers notice with the next request."""
        with self._changing() as owners:
            left = [owner for owner in owners if owner.name != name]
            if len(left) == len(owners):
                names = ", ".join(sorted(owner.name for owner in owners)) or "none"
                raise ConfigError(f"{self._path} has no key called {name!r}; it has {names}")
            owners[:] = left

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._read().values())

    def _read(self) -> dict[str, Owner]:
        with self._lock:
            try:
                status = self._path.stat()
                seen = (status.st_mtime_ns, status.st_ino)
                if seen != self._seen:
                    self._owners, self._seen = {owner.digest: owner for owner in self._load()}, seen
                return self._owners
            except OSError as error:
                raise ConfigError(f"the keys in {self._path} cannot be read: {error.strerror}") from error

    def _load(self) -> list[Owner]:
        try:
            return _file.validate_json(self._path.read_bytes()).get("keys", [])
        except ValueError as error:
            raise ConfigError(
                f"{self._path} is not a key file ({error}); create one: cacheblend-rag keys add FILE --tenant NAME"
            ) from error

    @contextmanager
    def _changing(self) -> Iterator[list[Owner]]:
        """Give the keys, and write what becomes of them; other threads and processes wait meanwhile."""
        try:
            # Its folder stays, whereas the file is replaced by another one.
            fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                owners = self._load() if self._path.exists() else []
                yield owners
                # Digests are no secret, but the owners of keys are private.
                text = _file.dump_json({"keys": owners}, indent=2).decode()
                replace_text(self._path, text + "\n", private=True)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(f"the keys in {self._path} cannot be written: {error.strerror}") from error


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
