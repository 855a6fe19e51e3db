"""A store in one file."""

import gzip
import hashlib
import io
import json
import random
import tarfile
import time
from pathlib import Path

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError, StoreFormatError
from cacheblend_rag.reading import Place, ReadingRules
from cacheblend_rag.store import NodeRecord, check_store, export_store, import_store
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import add, files_of, is_held, key_of, make_kv, open_store, record
from tests.store.test_life import Clocks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "s", 0)
    add(store, *range(1, 4))
    store.put(key_of(4), make_kv(4), tenant="acme", ttl_s=3600)
    store.name("acme's", [record("n1", 4)], tenant="acme")
    store.put(key_of(5), make_kv(5))
    store.close()
    return tmp_path / "s"


def members(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path, "r:") as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def forge(path: Path, contents: list[tuple[str, bytes]], *, kind: bytes = tarfile.REGTYPE) -> None:
    """Write an export whose digest is right, whatever it holds."""
    digest = hashlib.blake2b(digest_size=32)
    contents = [each for each in contents if each[0] != "manifest.json"]
    entries = sum(name.startswith("kv/") for name, _ in contents)
    names = sum(len(json.loads(data)) for name, data in contents if name.startswith("names/"))
    for name, data in contents:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    manifest = {"entries": entries, "names": names, "digest": digest.hexdigest()}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in [*contents, ("manifest.json", json.dumps(manifest).encode())]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name.startswith("kv/"):
                member.type = kind
                member.linkname = "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))


def test_to_another_store_and_again(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "export.tar"
    report = export_store(folder, file)
    assert (report.entries, report.names, report.damaged, report.nbytes) == (5, 4, 0, file.stat().st_size)
    assert file.stat().st_mode & 0o077 == 0
    target = tmp_path / "t"
    done = import_store(target, file)
    assert (done.entries, done.held, done.names, done.unchanged, done.kept) == (5, 0, 4, 0, 0)
    again = import_store(target, file)
    assert (again.entries, again.held, again.names, again.unchanged, again.kept) == (0, 5, 0, 4, 0)
    store = open_store(target, 0)
    for number in range(1, 6):
        assert is_held(store, number)
    assert store.names.lookup("ns", ["n1", "n3"]) == [record("n1", 1), record("n3", 3)]
    assert store.names.lookup("acme's", ["n1"]) == [record("n1", 4)]
    assert (store.stats("acme").entries, store.stats("acme").nodes) == (1, 1)
    store.name("ns", [record("n1", 9)])
    store.close()
    # What is there stays as it is.
    assert import_store(target, file).kept == 1
    store = open_store(target, 0)
    assert store.names.lookup("ns", ["n1"]) == [record("n1", 9)]
    store.close()
    # And KV that only the name in the file led to is not kept.
    assert len(files_of(target)) == 4
    assert check_store(target).is_clean
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export.tar", "s", "t"]


def test_a_part_of_a_store(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "export.tar"
    for tenant, ids, entries, names in [
        ("acme", None, 1, 1),
        ("", None, 4, 3),
        ("nobody", None, 0, 0),
        (None, ["n1", "n2", "x"], 3, 3),
        ("", ["n1"], 1, 1),
        (None, [], 0, 0),
    ]:
        report = export_store(folder, file, tenant, ids)
        assert (report.entries, report.names) == (entries, names)


def test_the_rest_of_a_life_goes_along(tmp_path: Path) -> None:
    clocks = Clocks(wall=4.0e9)
    store = clocks.open(tmp_path / "s")
    for number, ttl_s in ((1, 1000), (2, 3e9)):
        store.put(key_of(number), make_kv(number), ttl_s=ttl_s)
    store.close()
    export_store(tmp_path / "s", tmp_path / "f")
    import_store(tmp_path / "t", tmp_path / "f")
    store = open_store(tmp_path / "t", 0)
    assert store.holds([key_of(1), key_of(2)]) == [True, True]
    store.close()
    store = open_store(tmp_path / "t", 0, clock=Clocks(wall=time.time() + 10_000).clock())
    assert store.holds([key_of(1), key_of(2)]) == [False, True]


def test_what_is_damaged_is_left_out(folder: Path, tmp_path: Path) -> None:
    path = files_of(folder)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = export_store(folder, tmp_path / "f")
    assert (report.entries, report.damaged) == (4, 1)
    assert import_store(tmp_path / "t", tmp_path / "f").entries == 4


def test_documents_of_long_chunks_go_along_unless_no_import_would_read_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "s", 0)
    for document, tokens in (("long", 120_000), ("too long", 300_000)):
        ids = tuple(range(10**6, 10**6 + tokens))
        places = [Place(document, tokens * number, None, tokens, "", ids) for number in range(3)]
        named = [NodeRecord(f"{document} {place.start}", key_of(1), "h", ids, (), place) for place in places]
        store.name("ns", [*named, record("alone", 2)], rules=ReadingRules(100))
    wanted = store.names.document_tokens("ns", "long")
    store.close()
    report = export_store(tmp_path / "s", tmp_path / "f")
    assert report.names == 4 and "the names of document 'too long' are left out: it is longer than" in caplog.text
    assert import_store(tmp_path / "t", tmp_path / "f").names == 4
    store = open_store(tmp_path / "t", 0)
    assert store.names.document_tokens("ns", "long") == wanted


@pytest.mark.parametrize("samples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_a_damaged_file_gives_nothing(folder: Path, tmp_path: Path, samples: int) -> None:
    export_store(folder, tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    end = len(data.rstrip(b"\0"))
    chance = random.Random(3)
    copy = tmp_path / "damaged"
    for turn in range(samples):
        at = chance.randrange(end)
        if turn % 3:
            copy.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        else:
            copy.write_bytes(data[:at])
        try:
            import_store(tmp_path / "t", copy)
        except StoreError:
            assert not (tmp_path / "t").exists()
        else:
            # Bits that mean nothing: the archive's owner and date of a member, for instance.
            assert check_store(tmp_path / "t").entries == 5
            (tmp_path / "t").rename(tmp_path / f"t{turn}")


def test_what_is_no_export(folder: Path, tmp_path: Path) -> None:
    export_store(folder, tmp_path / "f")
    other = tmp_path / "other"
    for data in (b"", b"hello", gzip.compress((tmp_path / "f").read_bytes()), bytes(10_000)):
        other.write_bytes(data)
        with pytest.raises(StoreFormatError, match="is not an export of a store"):
            import_store(tmp_path / "t", other)
    with tarfile.open(other, "w") as tar:
        tar.add(folder / "store.json", "store.json")
    with pytest.raises(StoreFormatError, match="is not an export of a store"):
        import_store(tmp_path / "t", other)
    contents = members(tmp_path / "f")
    contents[0] = (contents[0][0], b'{"format": "cacheblend-rag export", "version": 3}')
    forge(other, contents)
    with pytest.raises(StoreFormatError, match="version 3, but this cacheblend-rag reads version 2"):
        import_store(tmp_path / "t", other)
    with pytest.raises(StoreError, match="cannot be read"):
        import_store(tmp_path / "t", tmp_path / "nothing")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "name",
    ["../escaped", "/tmp/escaped", "kv/../../escaped", "kv/..safetensors", "kv/../" + key_of(1) + ".safetensors", "x"],
)
def test_no_member_escapes(folder: Path, tmp_path: Path, name: str) -> None:
    export_store(folder, tmp_path / "f")
    contents = members(tmp_path / "f")
    forge(tmp_path / "forged", [contents[0], (name, b"x"), *contents[1:]])
    with pytest.raises(StoreError, match="which no export holds"):
        import_store(tmp_path / "deep" / "t", tmp_path / "forged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "forged", "s"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_only_plain_files(folder: Path, tmp_path: Path, kind: bytes) -> None:
    export_store(folder, tmp_path / "f")
    forge(tmp_path / "forged", members(tmp_path / "f"), kind=kind)
    with pytest.raises(StoreError, match="which no export holds"):
        import_store(tmp_path / "t", tmp_path / "forged")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("entries/000001.json", b"{}"),
        ("entries/000001.json", b"[1]"),
        ("entries/000001.json", b"[{}]"),
        ("names/000001.json", b"[[]]"),
        ("names/000001.json", b'[["ns", "", "x", "../../../etc", "h", [1]]]'),
        ("kv/" + key_of(77) + ".safetensors", b"not a chunk file"),
    ],
)
def test_forged_contents(folder: Path, tmp_path: Path, name: str, data: bytes) -> None:
    export_store(folder, tmp_path / "f")
    contents = members(tmp_path / "f")
    forge(tmp_path / "forged", [*contents[:-1], (name, data)])
    with pytest.raises(StoreError):
        import_store(tmp_path / "t", tmp_path / "forged")
    assert not (tmp_path / "t").exists() or check_store(tmp_path / "t").is_clean


def test_the_importing_engine_hits(make_engine: MakeEngine, tmp_path: Path) -> None:
    chunks = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]
    prompt = BlendPrompt("t1", chunks, "t2")
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=tmp_path / "s", tenant="acme") as engine:
        engine.add(chunks)
        wanted = engine.prefill(prompt).logits
    export_store(tmp_path / "s", tmp_path / "f", "acme")
    import_store(tmp_path / "t", tmp_path / "f")
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=tmp_path / "t", tenant="acme") as engine:
        result = engine.prefill(prompt)
        assert result.report.hits == 2
        assert (result.logits - wanted).abs().max() == 0
    engine = make_engine(tmp_path / "t")
    assert engine.prefill(prompt).report.hits == 0
