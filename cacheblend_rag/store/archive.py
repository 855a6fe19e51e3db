"""The file that a store is exported to.

The file is a tar archive, each member a plain file, in this order::

    cacheblend-rag-export.json   the format and its version
    kv/KEY.safetensors           the chunk files of up to 256 entries, byte for byte
    entries/000000.json          what the index knows of these; then the next ones
    names/000000.json            up to 256 names; those of a document stand together, in the order in which they came
    manifest.json                how many entries and names there are, and a digest of everything before it
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.errors import StoreError, StoreFormatError

__all__ = ["ArchiveWriter", "key_of_member", "read_archive"]

_FORMAT = "cacheblend-rag export"
_VERSION = 2
# In version 1 names have no places in documents.
_READABLE = (1, 2)
_HEAD, _MANIFEST = "cacheblend-rag-export.json", "manifest.json"
_KV = re.compile(r"kv/([0-9a-f]{8,128})\.safetensors")
_LIST = re.compile(r"(entries|names)/\d{6,12}\.json")
_LONGEST_LIST_BYTES = 256 * 1024**2


class ArchiveWriter:
    """Writes an exported file, and digests it.

    Parameters
    ----------
    stream : file
        Where to write; it stays the caller's to close.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)
        self._digest = hashlib.blake2b(digest_size=32)
        self.add_json(_HEAD, {"format": _FORMAT, "version": _VERSION})

    def add_json(self, name: str, value: Any) -> None:
        """Add a member that holds a value as JSON."""
        data = json.dumps(value, separators=(",", ":")).encode("ascii")
        self.add(name, io.BytesIO(data), len(data))

    def add(self, name: str, stream: IO[bytes], size: int) -> None:
        """Add a member of `size` bytes, read from `stream`."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o600
        self._digest.update(_label(name, size))
        self._tar.addfile(member, _Digesting(stream, self._digest))

    def close(self, entries: int, names: int) -> None:
        """Add the manifest, which says how many entries and names there are, and end the file."""
        self.add_json(_MANIFEST, {"entries": entries, "names": names, "digest": self._digest.hexdigest()})
        self._tar.close()


class _Digesting(io.RawIOBase):
    """A stream whose bytes are digested as they are read."""

    def __init__(self, stream: IO[bytes], digest: Any) -> None:
        self._stream = stream
        self._digest = digest

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data


def _label(name: str, size: int) -> bytes:
    return f"{name}\0{size}\0".encode()


def read_archive(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of an exported file's members, and raise unless they are, to the end, what was exported.

    Raises
    ------
    StoreFormatError
        If the file is no export, or one of a later version.
    StoreError
        If it is damaged.
    """

    def damaged(why: str) -> StoreError:
        return StoreError(f"export file {path} is damaged ({why}); nothing of it can be used, copy it again")

    stream.seek(0)
    digest = hashlib.blake2b(digest_size=32)
    counted = {"entries": 0, "names": 0}
    is_ours, manifest = False, None
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if not is_ours and member.name != _HEAD:
                    break
                expected = _KV.fullmatch(member.name) or _LIST.fullmatch(member.name)
                if manifest is not None or not member.isreg() or not (expected or member.name in (_HEAD, _MANIFEST)):
                    raise damaged(f"it holds {member.name[:100]!r}, which no export does")
                if not _KV.fullmatch(member.name) and member.size > _LONGEST_LIST_BYTES:
                    raise damaged(f"{member.name} is too long")
                reader = tar.extractfile(member)
                data = b"" if reader is None else reader.read()
                if len(data) != member.size:
                    raise damaged("it is cut short")
                if not is_ours:
                    _check_head(path, data)
                    is_ours = True
                if member.name == _MANIFEST:
                    manifest = json.loads(data)
                    if manifest != {**counted, "digest": digest.hexdigest()}:
                        raise damaged("its bytes do not match its digest")
                    continue
                digest.update(_label(member.name, member.size))
                digest.update(data)
                counted["entries"] += member.name.startswith("kv/")
                if member.name.startswith("names/"):
                    counted["names"] += len(json.loads(data))
                yield member.name, data
                tar.members.clear()  # type: ignore[attr-defined]  # or it remembers every member
    except (tarfile.TarError, ValueError, EOFError, RecursionError, TypeError) as error:
        if is_ours:
            raise damaged(str(error)) from error
    if not is_ours:
        raise StoreFormatError(f"file {path} is no export of a store; make one with `cacheblend-rag store export`")
    if manifest is None:
        raise damaged("it ends before its manifest")


def _check_head(path: Path, data: bytes) -> None:
    head = json.loads(data)
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise StoreFormatError(f"file {path} is no export of a store; make one with `cacheblend-rag store export`")
    if head.get("version") not in _READABLE:
        raise StoreFormatError(
            f"export file {path} is in format version {head.get('version')!r}, this cacheblend-rag reads up to {_VERSION}; "
            "export it again with this version"
        )


def key_of_member(name: str) -> str | None:
    """Return the store key whose chunk file a member is, or None if it is no chunk file."""
    match = _KV.fullmatch(name)
    return None if match is None else match[1]
