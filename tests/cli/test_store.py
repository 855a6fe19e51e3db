"""Looking after a store by the command."""

import json
from pathlib import Path

from cacheblend_rag.store import check_store, open_store
from tests.command import read_rows, run
from tests.store.kit import add, key_of, make_kv, record


def test_export_import_gc_and_clear_of_one_tenant(tmp_path: Path) -> None:
    one, two, file, figures = (tmp_path / name for name in ("one", "two", "export.tar", "figures.json"))
    store = open_store(one, 0)
    for number, tenant in ((1, ""), (2, "acme"), (3, "acme")):
        store.put(key_of(number), make_kv(number), tenant=tenant)
        store.name(f"ns{tenant}", [record(f"n{number}", number)], tenant=tenant)
    store.put(key_of(4), make_kv(4), ttl_s=0.001)
    store.close()

    out = run("store", "export", file, "--store", one, "--tenant", "acme", "--json", figures).stdout
    assert "2 chunks with KV and 2 names" in out
    assert read_rows(figures)[0]["entries"] == 2
    assert "added 2 chunks with KV" in run("store", "import", file, "--store", two).stdout
    assert "(2 were there)" in run("store", "import", file, "--store", two, "--json", figures).stdout
    assert read_rows(figures)[0]["held"] == 2
    assert check_store(two).entries == 2
    assert "--force" in run("store", "export", file, "--store", one, code=2).stderr
    out = run("store", "export", file, "--store", one, "--ids", "n3, x", "--force").stdout
    assert "1 chunks with KV and 1 names" in out

    out = run("store", "gc", "--store", one, "--unnamed-days", "0", "--json", figures).stdout
    assert "removed 1 expired chunks, 0 without a name and 0 stray files" in out
    assert read_rows(figures)[0]["expired"] == 1
    assert "tenant acme" in run("store", "stats", "--store", one, "--json", figures).stdout
    assert read_rows(figures)[0]["tenants"]["acme"]["entries"] == 2
    out = run("store", "clear", "--store", one, "--tenant", "acme", "--yes").stdout
    assert "holds nothing of tenant acme any more" in out
    assert check_store(one).entries == 1
    file.write_bytes(file.read_bytes()[:700])
    assert "is damaged" in run("store", "import", file, "--store", two, code=1).stderr


def test_pin_and_unpin(tmp_path: Path) -> None:
    folder, figures = tmp_path / "store", tmp_path / "figures.json"
    store = open_store(folder, 0)
    store.put(key_of(1), make_kv(1))
    store.name("ns", [record("n1", 1), record("n2", 1)])
    size = store.stats().disk_bytes
    assert "pinned 2 chunks" in run("store", "pin", "n1", "n2", "--store", folder, "--json", figures).stdout
    assert read_rows(figures) == [{"store": str(folder), "pinned": 2, "pinned_bytes": size}]
    out = run("store", "unpin", "n1", "nobody", "--store", folder, code=2).stderr
    assert "no chunk has the id 'nobody'" in out and "Traceback" not in out
    assert "unpinned 1 chunks" in run("store", "unpin", "n1", "--store", folder).stdout
    assert store.stats().pinned_bytes == size
    assert "'n2'" in run("store", "pin", "n2", "--store", folder, "--tenant", "acme", code=2).stderr
    run("store", "unpin", "n2", "--store", folder, "--json", figures)
    assert read_rows(figures) == [{"store": str(folder), "unpinned": 1, "pinned_bytes": 0}]
    store.close()


def test_the_json_on_standard_output(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    add(store, 1)
    store.close()
    for command in ("stats", "check", "gc", "clear"):
        result = run("store", command, "--store", tmp_path, "--json", "-", input="y\n")
        whole = json.loads(result.stdout)
        assert whole["command"] == f"store {command}"
        assert whole["rows"][0]["store"] == str(tmp_path)
        assert str(tmp_path) in result.stderr
    assert not Path("-").exists()
    # A later argument is wrong: nothing is written, and the next command's output goes where it went before.
    assert not run("store", "gc", "--json", "-", "--unnamed-days", "x", code=2).stdout
    assert str(tmp_path) in run("store", "stats", "--store", tmp_path).stdout
