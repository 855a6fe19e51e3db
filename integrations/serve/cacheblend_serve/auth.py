"""API keys: a file of their digests, and the tenant that each one speaks for."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import replace_text
from cacheblend_rag.store.folder import let_go

__all__ = ["OPEN", "KeyFile", "Owner"]

_MARK = "cb-"


@dataclass(frozen=True)
class Owner:
    """Owner of a key.

    Attributes
    ----------
    tenant : str or None
        The tenant whose chunks it sees; None is that of the engine's settings.
    name : str
        What people call the key.
    per_minute : int or None
        Most requests of a minute; None for those of the server's settings.
    is_admin : bool
        Whether it may also see the figures of all tenants.
    digest : str
        The digest of the key; empty where none is asked for.
    """

    tenant: str | None
    name: str
    per_minute: int | None = None
    is_admin: bool = False
    digest: str = ""

    def __post_init__(self) -> None:
        if self.per_minute is not None and (type(self.per_minute) is not int or self.per_minute < 1):
            raise ValueError(f"per_minute={self.per_minute!r:.40} of the key {self.name!r:.40} must be 1 or more")


OPEN = Owner(None, "anybody", is_admin=True)
"""Owner of all requests to a server without keys."""


class KeyFile:
    """The keys of a server, in a JSON file that only holds what a key's digest is; it is read again when it changes.

    Parameters
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._owners: dict[str, Owner] = {}

    def owner(self, key: str) -> Owner | None:
        """Return the owner of a key; None if it was never given out, or was taken back.

        Raises
        ------
        ConfigError
            If the file cannot be read.
        """
        # A digest of 256 random bits can be looked up: how long that takes says nothing of the key.
        return self._read().get(_digest(key))

    def check(self) -> None:
        """Raise `ConfigError` if the file cannot be read, or holds no key."""
        if not self._read():
            raise ConfigError(
                f"{self._path} holds no key; create one: cacheblend-rag keys add {self._path} --tenant NAME"
            )

    def add(self, owner: Owner) -> str:
        """Make a key; it is told here and never again.

        Raises
        ------
        ConfigError
            If a key of that name is there already, or the file cannot be read or written.
        """
        with self._changing():
            owners = list(self._load().values()) if self._path.exists() else []
            if any(known.name == owner.name for known in owners):
                raise ConfigError(
                    f"{self._path} has a key called {owner.name!r} already; give another name, or remove that one"
                )
            key = _MARK + secrets.token_urlsafe(32)
            self._write([*owners, replace(owner, digest=_digest(key))])
        return key

    def remove(self, name: str) -> None:
        """Take a key back by its name; servers notice with the next request.

        Raises
        ------
        ConfigError
            If there is none of that name, or the file cannot be read or written.
        """
        with self._changing():
            owners = self._load().values()
            left = [owner for owner in owners if owner.name != name]
            if len(left) == len(owners):
                names = ", ".join(sorted(owner.name for owner in owners)) or "none"
                raise ConfigError(f"{self._path} has no key called {name!r}; it has {names}")
            self._write(left)

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._read().values())

    def _read(self) -> dict[str, Owner]:
        with self._lock:
            try:
                status = self._path.stat()
            except OSError as error:
                raise ConfigError(f"the keys in {self._path} cannot be read: {error.strerror}") from error
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                self._owners, self._seen = self._load(), seen
            return self._owners

    def _load(self) -> dict[str, Owner]:
        try:
            written = json.loads(self._path.read_text(encoding="utf-8"))
            owners = {each["digest"]: Owner(**each) for each in written["keys"]}
        except OSError as error:
            raise ConfigError(f"the keys in {self._path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._path} is not a key file ({error}); create one: cacheblend-rag keys add FILE --tenant NAME"
            ) from error
        names = [owner.name for owner in owners.values()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{self._path} has several keys called {twice!r}; leave one of them there")
        return owners

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other threads and processes from changing the file."""
        try:
            # Its folder stays, whereas the file is replaced by another one.
            fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            let_go(fd)

    def _write(self, owners: Iterable[Owner]) -> None:
        text = json.dumps({"keys": [asdict(owner) for owner in owners]}, indent=2)
        try:
            # Digests are no secret, but the owners of keys are private.
            replace_text(self._path, text + "\n", private=True)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> ConfigError:
        return ConfigError(f"the keys in {self._path} cannot be written: {error.strerror}")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
