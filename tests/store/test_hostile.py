"""Export files that somebody wrote to do harm."""

import hashlib
import json
import os
import resource
import shutil
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store, import_store
from cacheblend_rag.store.chunkfile import encode_chunk
from tests.limits import end_of_child, within
from tests.store.kit import key_of, make_kv, start

KEY = key_of(1)
HEAD = ("cacheblend-rag-export.json", b'{"format":"cacheblend-rag export","version":2}')
ENTRIES = [{"key": KEY, "tenant": "", "lives_s": None}]
# Of none, and of a document.
NAMES = [
    ["other", "", "c", KEY, "h", [1], [], None],
    ["ns", "", "a", KEY, "h", [1, 2], [3], ["d", 0, None, 3, "", [1, 3], 60.0, 100]],
    ["ns", "", "b", KEY, "h", [1, 2], [3], ["d", None, "a", 3, "abc", [1, 3], None, None]],
]
CHUNK = b"".join(map(bytes, encode_chunk(KEY, make_kv(1)).buffers))

# JSON that is right nowhere in these lists.
JUNK = st.one_of(
    st.sampled_from(["true", "{}", "[[]]", '["x"]', "NaN", "1e999", "9" * 4000, "9" * 10_000, "[-1]", "[1.5]", "["]),
    st.integers(3, 200_000).map(lambda depth: "[" * depth + "]" * depth),
)
SAMPLES = [pytest.param(40, id="sampled"), pytest.param(1000, marks=pytest.mark.full, id="all")]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def archive(contents: list[tuple[str, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers and bytes of an export whose digest is right, whatever it holds."""
    digest = hashlib.blake2b(digest_size=32)
    for name, data in contents:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    manifest = {"entries": 1, "names": len(NAMES), "digest": digest.hexdigest()}
    members = [*contents, ("manifest.json", json.dumps(manifest).encode())]
    return [(header(name, len(data)), data + bytes(-len(data) % 512)) for name, data in members]


def contents(
    chunk: bytes = CHUNK, entries: Any = ENTRIES, names: Any = NAMES, junk: str = ""
) -> list[tuple[str, bytes]]:
    lists = [json.dumps(each).replace('"JUNK"', junk).encode() for each in (entries, names)]
    return [HEAD, (f"kv/{KEY}.safetensors", chunk), ("entries/000000.json", lists[0]), ("names/000000.json", lists[1])]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where a value and all inside it stand."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a value with another at a place in it."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@st.composite
def hostile_lists(draw: st.DrawFn) -> bytes:
    """An export one of whose lists holds something else than what is exported."""
    number = draw(st.integers(0, 1))
    lists: list[Any] = [ENTRIES, NAMES]
    lists[number] = changed(lists[number], draw(st.sampled_from(list(places(lists[number])))), "JUNK")
    return b"".join(head + data for head, data in archive(contents(CHUNK, *lists, junk=draw(JUNK))))


@st.composite
def hostile_headers(draw: st.DrawFn) -> bytes:
    """An export one of whose headers claims another kind of member, or more bytes than there are."""
    members = archive(contents())
    at = draw(st.integers(0, len(members) - 1))
    name = tarfile.TarInfo.frombuf(members[at][0], "utf-8", "strict").name
    kind = draw(st.sampled_from([bytes([code]) for code in range(256) if bytes([code]) != tarfile.REGTYPE]))
    size = draw(st.sampled_from([0, 512, len(members[at][1]), 10**6, 3 * 10**9, 2**40, 2**62, -1, -(2**40)]))
    if draw(st.booleans()):
        kind, size = tarfile.REGTYPE, draw(st.integers(100_000, 2**62))
    data = members[at][1]
    if draw(st.booleans()):
        # What a reader of all that tar can do would take for attributes, long names or a table of holes.
        data = draw(
            st.sampled_from([b"28 GNU.sparse.realsize=9999999\n", b"9" * 512, b"\xff" * 1024, b"1\n0\n9999999\n"])
        )
        data += bytes(-len(data) % 512)
    members[at] = (header(name, size, kind), data)
    return b"".join(head + data for head, data in members)


@st.composite
def hostile_chunks(draw: st.DrawFn) -> bytes:
    """An export with a chunk file whose digest is right, and whose header says something that is not so."""
    length = int.from_bytes(CHUNK[:8], "little")
    header = json.loads(CHUNK[8 : 8 + length])
    header["__metadata__"]["forms"] = json.loads(header["__metadata__"]["forms"])
    # What is not read: where the KV began, and the types of the first two tensors, which have but one.
    unread = {("__metadata__", "start"), ("token_ids", "dtype"), ("header_digest", "dtype"), ("header_digest", "shape")}
    path = draw(st.sampled_from([path for path in places(header) if path[:2] not in unread]))
    junk = draw(JUNK)
    if path and isinstance(path[-1], int):
        junk = draw(
            JUNK | st.sampled_from(["-1", "4294967296", "1000000000000", "-1000000000000", "1e300", "0.5", "null"])
        )
    told = changed(header, path, "JUNK")
    if len(path) > 1 and path[1] == "forms":
        told["__metadata__"]["forms"] = json.dumps(told["__metadata__"]["forms"]).replace('"JUNK"', junk)
    elif path not in ((), ("__metadata__",)):
        told["__metadata__"]["forms"] = json.dumps(told["__metadata__"]["forms"])
    text = json.dumps(told).replace('"JUNK"', junk).encode()
    tokens_end = 8 + length + 4 * len(make_kv(1).token_ids)
    head = len(text).to_bytes(8, "little") + text + CHUNK[8 + length : tokens_end]
    chunk = head + hashlib.blake2b(head, digest_size=16).digest() + CHUNK[tokens_end + 16 :]
    note(f"{path}: {junk[:80]}")
    return b"".join(head + data for head, data in archive(contents(chunk)))


def test_without_harm_it_is_an_export(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"".join(head + data for head, data in archive(contents())))
    assert import_store(tmp_path / "t", tmp_path / "f").names == len(NAMES)


def rows_of(count: int, *, limit: str = "null", apart: bool = False, twice: bool = False) -> Iterator[str]:
    """Yield names of one document, of a token each; every other one of another document, or each id twice."""
    for number in range(count):
        document = "de"[number % 2 if apart else 0]
        name = f"n{number // 2 if twice else number}"
        yield f'["ns","","{name}","{KEY}","h",[{number}],[],["{document}",{number},null,1,"",[1],null,{limit}]]'


def listed(rows: Iterator[str], a_list: int = 256) -> list[tuple[str, bytes]]:
    lists = iter(lambda: list(islice(rows, a_list)), [])
    return [(f"names/{number:06}.json", f"[{','.join(some)}]".encode()) for number, some in enumerate(lists)]


HEADERS = [b"[" + b"[]," * 170_000, b"[" * 100_000, b"{}", b'{"a":' * 50_000, b" " * 5_000_000, b"[" + b"[]," * 10**6]
VALUES = [b"[],", b"{},", b'{"":0},', b"0,", b"1e9,", b'"",', b"-1,", b"9999999,", b'"\\U0001f600",']
NAMED = ["a/" * 40, "../" * 20, "/etc/passwd", "kv/", "names/1.json", "é" * 40, "", "kv\\x"]


@st.composite
def hostile_members(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """What an export would hold, but for one thing: its digest is right."""
    good = contents()
    chunk = good[1]
    chunks, size = draw(st.integers(300, 20_000)), draw(st.sampled_from([0, 1, 512]))
    at = draw(st.integers(0, len(good)))
    count = draw(st.integers(20_000, 100_000))
    name, value = draw(st.sampled_from(NAMED)), draw(st.sampled_from(VALUES))
    longest = 2 * 1024**2 // len(value)
    many = draw(st.sampled_from([longest - 2, longest, 2 * longest]))
    header = HEADERS[draw(st.integers(0, len(HEADERS) - 1))]
    length = draw(st.sampled_from([len(header), 2**32, 2**63, 2**64 - 1])).to_bytes(8, "little")
    wholes: list[Callable[[], list[tuple[str, bytes]]]] = [
        # Chunks that are there in thousands, or not at all.
        lambda: [HEAD, *((f"kv/{key:040x}.safetensors", bytes(size)) for key in range(chunks))],
        lambda: [HEAD, ("entries/000000.json", json.dumps(ENTRIES * 200).encode()), *good[3:]],
        lambda: [*good[:2], ("entries/000000.json", json.dumps(ENTRIES * 2).encode()), *good[3:]],
        lambda: [HEAD, *good[3:], *good[1:3]],
        lambda: [HEAD, chunk, chunk, *good[2:]],
        lambda: [*good, ("names/000002.json", good[3][1])],
        lambda: [*good, good[3]],
        lambda: [*good[:at], (name, b"x"), *good[at:]],
        # Lists that are large when they are read.
        lambda: [*good[:3], ("names/000000.json", b"[" + value * many + b"0]")],
        lambda: [*good[:2], ("entries/000000.json", b"[" + value * many + b"0]")],
        lambda: [*good[:3], *listed(rows_of(257), 257)],
        # A document of very many pieces, or one that comes again and again.
        lambda: [*good[:3], *listed(rows_of(count + 20_000))],
        lambda: [*good[:3], *listed(rows_of(count, limit="8192", apart=True))],
        lambda: [*good[:3], *listed(rows_of(count, twice=True))],
        # Heads of chunks that are long, or say that they are.
        lambda: [HEAD, (chunk[0], length + header), *good[2:]],
    ]
    return wholes[draw(st.integers(0, len(wholes) - 1))]()


def forged(members: list[tuple[str, bytes]]) -> bytes:
    return b"".join(head + data for head, data in archive(members))


HOSTILE = st.one_of(
    hostile_lists(),
    hostile_headers(),
    hostile_chunks(),
    hostile_members().map(forged),
    hostile_members().map(forged),
)


def import_hostile(folder: Path, samples: int) -> None:
    """Import files, each of which is refused or does no harm; in a process of its own, which forks for each."""

    # The settings that all tests have are not those of another process.
    @settings(max_examples=samples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(HOSTILE, st.sampled_from([0, 0, 0, 10**6, 10**10]))
    def harmless(data: bytes, hole_bytes: int) -> None:
        file, target, said = folder / "f", folder / "t", folder / "said"
        file.write_bytes(data)
        # Sizes that are told are there then, in a hole that takes no room.
        os.truncate(file, len(data) + hole_bytes)
        said.write_text("")
        note(f"{len(data)} bytes and a hole of {hole_bytes}")

        def work() -> None:
            with within(200_000_000, 1.0):
                try:
                    import_store(target, file)
                except StoreError as error:
                    said.write_text(str(error))

        used = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        status, usage = end_of_child(work)
        assert status == 0
        assert usage.ru_maxrss * 1024 - used < 200_000_000
        assert usage.ru_utime + usage.ru_stime < 1.0
        assert len(said.read_text()) < 1000
        assert target.exists() != bool(said.read_text())
        if target.exists():
            assert check_store(target).is_clean
            shutil.rmtree(target)

    harmless()


@pytest.mark.parametrize("samples", SAMPLES)
def test_hostile_exports_are_refused_before_they_take_memory(tmp_path: Path, samples: int) -> None:
    process = start(import_hostile, tmp_path, samples)
    process.join(1800)
    assert process.exitcode == 0


def test_a_member_with_holes_takes_no_memory(tmp_path: Path) -> None:
    members = archive(contents())
    sparse = bytearray(header(f"kv/{KEY}.safetensors", 512, tarfile.GNUTYPE_SPARSE))
    # A table of one piece, and the size of the whole.
    sparse[386:410], sparse[483:495] = b"00000000000\0" + b"00000001000\0", b"32000000000\0"
    sparse[148:156] = b"%06o\0 " % (sum(sparse) - sum(sparse[148:156]) + 8 * 32)
    members[1] = (bytes(sparse), bytes(512))
    (tmp_path / "f").write_bytes(b"".join(head + data for head, data in members))
    with tarfile.open(tmp_path / "f") as tar:
        assert [member.size for member in tar][1] > 3 * 10**9
    with within(200_000_000, 1.0), pytest.raises(StoreError, match="which no export holds"):
        import_store(tmp_path / "t", tmp_path / "f")
