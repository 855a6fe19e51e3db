"""Remote tiers: KV under content keys in Redis, Valkey or any fsspec filesystem, shared by machines.

Names stay in each machine's own index. The bytes are those of a chunk file (`cacheblend_rag.store.chunkfile`), so that every
byte read from a remote tier is verified before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk
from cacheblend_rag.store.remote.base import RemoteSettings, RemoteTier

__all__ = ["ByteSource", "EncodedChunk", "RemoteSettings", "RemoteTier", "open_remote", "redis_address", "shown_url"]

# Valkey speaks the same protocol.
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_REDIS_QUERY = {
    "db",
    "client_name",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
_SECRET_WORDS = ("secret", "token", "password", "credential", "key", "sas", "connection_string", "passphrase")


def open_remote(url: str, *, storage_options: Mapping[str, Any] | None = None, **settings: Any) -> RemoteTier:
    """Make the remote tier that a URL names. Nothing is connected to until it is used.

    Parameters
    ----------
    url : str
        ``redis://user:password@host:6379/0``, ``valkey://…``, with TLS ``rediss://…`` or ``valkeys://…`` (extra ``redis``); or
        the folder of any fsspec filesystem (extra ``fsspec``): ``s3://bucket/prefix`` (extra ``s3``),
        ``file:///mnt/share/kv``, ``memory://name``.
    storage_options : mapping, optional
        What the fsspec filesystem is made with: credentials, ``endpoint_url``.
    **settings
        As in `RemoteSettings`.

    Returns
    -------
    RemoteTier
        The tier.

    Raises
    ------
    ConfigError
        If the URL or a setting has no meaning, or a package is missing; the message names the extra to install.
    """
    made = RemoteSettings(**settings)
    location = shown_url(url)
    server = redis_address(url)
    if server is not None:
        if storage_options:
            raise ConfigError(f"storage_options are for fsspec filesystems; {location} is not one")
        from cacheblend_rag.store.remote.redis import RedisTier

        try:
            return RedisTier(*server, made)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{location} is not a Redis URL; give one like redis://user:password@host:6379/0"
            ) from None
    options = dict(storage_options or {})
    parts = _split(url)
    hidden = [*_hidden(parts), *_secrets_of(options)]
    try:
        from cacheblend_rag.store.remote.fsspec import FsspecTier
    except ImportError as error:
        raise _missing("fsspec", location, error) from error
    try:
        return FsspecTier(url, location, hidden, made, options)
    except ImportError as error:
        extra = "s3" if parts.scheme in ("s3", "s3a") else "fsspec"
        raise _missing(extra, location, error) from error
    except ConfigError:
        raise
    except Exception as error:
        # What a filesystem says of its options may quote them.
        raise ConfigError(
            f"fsspec makes no filesystem of {location} with the options {sorted(options)} ({type(error).__name__}); "
            "fsspec.available_protocols() lists what can stand before ://"
        ) from None


def redis_address(url: str) -> tuple[str, str, list[str]] | None:
    """Return the address that redis-py takes, the one that may be shown, and the secrets in the first; None for no Redis.

    Raises
    ------
    ConfigError
        If a parameter is unknown, or redis-py is missing.
    """
    parts, location = _split(url), shown_url(url)
    if parts.scheme not in _REDIS:
        return None
    unknown = sorted({name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - _REDIS_QUERY)
    if unknown:
        raise ConfigError(
            f"{location}: unknown parameters {', '.join(unknown)}; a Redis URL takes {', '.join(sorted(_REDIS_QUERY))}"
        )
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise _missing("redis", location, error) from error
    return _REDIS[parts.scheme] + url[url.index(":") :], location, _hidden(parts)


def _hidden(parts: SplitResult) -> list[str]:
    """Return the secrets in a URL, both as they are written there and as they are meant."""
    words = [word for part in (parts.password, _userinfo(parts)) if part for word in (part, unquote(part))]
    return words + [value for name, value in parse_qsl(parts.query) if _is_secret(name)]


def shown_url(url: str) -> str:
    """Return a URL without user, password and query."""
    parts = _split(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        # Looked at here, because it is only now that a bad port is found.
        _ = parts.port if parts.scheme in _REDIS else None
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    # A password with one of /?# in it ends the address too early, and its rest would be taken for a path and shown.
    is_redis = parts.scheme in _REDIS
    if (
        not parts.scheme
        or "://" not in url
        or (is_redis and (not parts.netloc or "@" in url.partition(parts.netloc)[2]))
    ):
        raise ConfigError(
            "the remote tier's address is not a URL; give one like redis://host:6379/0 or s3://bucket/prefix, "
            "with /, ?, #, @ and : in a password written as %2F, %3F, %23, %40 and %3A"
        )
    return parts


def _userinfo(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[0]


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET_WORDS)


def _secrets_of(options: Mapping[str, Any], all_of_it: bool = False) -> Iterator[str]:
    for name, value in options.items():
        secret = all_of_it or _is_secret(str(name))
        if isinstance(value, Mapping):
            yield from _secrets_of(value, secret)
        elif secret and isinstance(value, str):
            yield value


def _missing(extra: str, location: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{location} needs a package that is not installed ({error}): pip install 'cacheblend-rag[{extra}]'"
        + (" and the package that fsspec asks for" if extra == "fsspec" else "")
    )
