"""Files cut into passages."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag import Chunk
from cacheblend_rag.documents.splitter import cut, read_files, split_text

# Words are set apart by room alone, as most programs set them; a hyphen ends the line.
PAGE = """BT /F 12 Tf 40 200 Td [(Pim)-250(is)-250(a)-250(strip)20(ed)-250(goat)-250(of)-250(Oak-)] TJ 0 -14 Td (ford.) Tj ET"""
PDF = f"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/Contents 4 0 R/MediaBox[0 0 300 300]/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length {len(PAGE)}>>stream
{PAGE}
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
""".encode()


def words(text: str) -> int:
    return len(text.split())


PIECES = ["word", "longer ", "x", ". ", "\n", "\n\n", "# ", "```\n", " ", "é。", "\r\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=200))
def test_nothing_is_lost_and_nothing_is_too_long(pieces: list[str]) -> None:
    text = "".join(pieces)
    passages = split_text(text, len, 40)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(passage in text and passage == passage.strip() and 0 < len(passage) <= 40 for passage in passages)


def read(*paths: Path, size: int = 10) -> list[Chunk]:
    return cut(read_files(paths)[0], words, size)


def test_folders_are_read_in_order_without_what_is_hidden_or_no_text(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", ".hidden.md", "picture.png", "c/d.rst", ".git/e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert [passage.text for passage in read(tmp_path)] == ["text of a.txt", "text of b.md", "text of c/d.rst"]


def test_a_passage_keeps_its_id_when_it_moves_and_loses_it_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo\n\nthree")
    before = {passage.text: passage for passage in read(file, size=1)}
    file.write_text("zero\n\none\n\none\n\ntwo!\n\nthree")
    passages = read(file, size=1)
    after = {passage.text: passage for passage in reversed(passages)}
    assert after["one"].id == before["one"].id
    assert after["one"].start == before["one"].start + len("zero\n\n")
    assert after["two!"].id != before["two"].id
    # The same words twice are two passages.
    assert len({passage.id for passage in passages}) == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("latin.txt", "Åse".encode("latin-1")),
        ("cut.txt", "Å".encode()[:1]),
        ("utf16.txt", "Åse".encode("utf-16")),
        ("late.md", b"text" * 50_000 + b"\0"),
        ("broken.pdf", b"%PDF-1.7\n\xff\xfe\x00 and no more"),
        ("missing.txt", None),
        ("pipe", os.mkfifo),
        # Only the beginning is read of what is no text.
        ("zeros.txt", 2**40),
    ],
)
def test_what_is_no_text_is_left_out_and_fails_nothing_else(tmp_path: Path, name: str, content: Any) -> None:
    good, path = tmp_path / "good.txt", tmp_path / name
    good.write_text("good")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, int):
        with open(path, "wb") as file:
            file.truncate(content)
    elif content is not None:
        content(path)
    texts, left_out = read_files([path, good])
    assert (list(texts.values()), list(left_out)) == (["good"], [path])
    # As in a folder, which has no pipe, and none that is not there.
    assert list(read_files([tmp_path])[0].values()) == ["good"]


def test_a_name_that_is_not_utf8_is_left_out_by_one_that_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    for name in (b"caf\xe9.txt", b"caf\xe9"):
        place = os.fsencode(tmp_path) + b"/" + name
        if name.endswith(b"txt"):
            Path(os.fsdecode(place)).write_text("bad")
        else:
            os.mkdir(place)
            Path(os.fsdecode(place), "page.md").write_text("bad")
    texts, left_out = read_files([tmp_path])
    assert list(texts.values()) == ["good"]
    assert {str(path.relative_to(tmp_path)) for path in left_out} == {"caf\ufffd.txt", "caf\ufffd/page.md"}


def test_other_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<h1>Pim</h1><script>no()</script><p>A goat.</p>")
    (tmp_path / "page.pdf").write_bytes(PDF)
    html, pdf = read_files([tmp_path])[0].values()
    assert html == "# Pim\n\nA goat."
    assert " ".join(pdf.split()) == "Pim is a striped goat of Oakford."


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("page.html", "markitdown"), ("page.pdf", "pypdfium2")):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / name).write_bytes(PDF)
        assert "[files]" in read_files([tmp_path])[1][tmp_path / name]


def test_files_are_read_once_and_linked_folders_not(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("a")
    (tmp_path / "up").symlink_to(".")
    (tmp_path / "same.md").symlink_to("page.md")
    (tmp_path / "self.md").symlink_to("self.md")
    assert [passage.text for passage in read(tmp_path, tmp_path / "page.md", tmp_path / "up")] == ["a"]
