"""Addresses of remote tiers: what they mean, and what of them is never shown."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_remote, open_store
from cacheblend_rag.store.remote import shown_url


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_redis_and_valkey(scheme: str) -> None:
    pytest.importorskip("redis")
    tier = open_remote(f"{scheme}://user:pass@host:7000/3")
    assert tier.location == f"{scheme}://host:7000/3"


NO_ADDRESSES = [
    "",
    "/a/folder",
    "redis:host",
    "redis://:sec/ret@host",
    "redis://:sec#ret@host",
    "redis://:secret@host:port",
]


@pytest.mark.parametrize("url", [*NO_ADDRESSES, "redis://[secret@host", "gopher://user:secret@host/x"])
def test_what_is_no_address(url: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError) as caught:
        open_remote(url)
    assert "sec/ret" not in str(caught.value) and ":secret" not in str(caught.value)
    assert caught.value.__cause__ is None or "secret" not in str(caught.value.__cause__)


words = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?#@:%[]"), min_size=8)


@given(user=words, password=words)
def test_credentials_are_never_shown(user: str, password: str) -> None:
    shown = shown_url(f"redis://{user}:{password}@host:6379/0?password={password}")
    assert shown == "redis://host:6379/0"


@pytest.mark.parametrize(("package", "url"), [("redis", "redis://host"), ("fsspec", "memory://x")])
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, package: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"-e '\.\[{package}\]'"):
        open_remote(url)


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_filesystem_that_fsspec_has_no_package_for() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="gcsfs"):
        open_remote("gs://bucket/x")


@pytest.mark.parametrize(
    ("url", "setting"),
    [
        ("redis://host", {"ttl_s": 0}),
        ("redis://host", {"ttl_s": float("nan")}),
        ("redis://host", {"read_timeout_s": None}),
        ("redis://host", {"storage_options": {"key": "a"}}),
        ("memory://x", {"ttl_s": 5}),
    ],
)
def test_settings_without_a_meaning(url: str, setting: dict[str, Any]) -> None:
    pytest.importorskip("fsspec" if url.startswith("memory") else "redis")
    with pytest.raises(ConfigError):
        open_remote(url, **setting)


def test_shared_names_need_a_package(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cacheblend-ray"):
        open_store(tmp_path / "kv", 0, names="s3://user:secret@bucket")
    assert not (tmp_path / "kv").exists()
