"""Files cut into passages."""

import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.documents.splitter import Passage, cut, read_files, split_text

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


@given(
    st.lists(
        st.sampled_from(["word", "longer ", "x", ". ", "\n", "\n\n", "# ", "```\n", " ", "é。", "\r\n"]), max_size=200
    )
)
def test_nothing_is_lost_and_nothing_is_too_long(pieces: list[str]) -> None:
    text = "".join(pieces)
    passages = split_text(text, len, 40)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(passage in text and passage == passage.strip() and 0 < len(passage) <= 40 for passage in passages)


def read(*paths: Path, size: int = 10) -> list[Passage]:
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
    file.write_text("zero\n\none\n\ntwo!\n\nthree")
    after = {passage.text: passage for passage in read(file, size=1)}
    assert after["one"].id == before["one"].id
    assert after["one"].position == before["one"].position + 1
    assert after["two!"].id != before["two"].id


def test_the_same_words_twice_are_two_passages() -> None:
    passages = cut({"a.txt": "same\n\nsame\n\nsame"}, words, 1)
    assert len({passage.id for passage in passages}) == 3


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("latin.txt", "Åse".encode("latin-1"), "it is not UTF-8 text"),
        ("cut.txt", "Å".encode()[:1], "it is not UTF-8 text"),
        ("utf16.txt", "Åse".encode("utf-16"), "it has NUL bytes"),
        ("late.md", b"text" * 50_000 + b"\0", "it has NUL bytes"),
        (
            "broken.pdf",
            b"%PDF-1.7\n\xff\xfe\x00 and no more",
            "its format needs|it cannot be converted|no text was found",
        ),
        ("folder.txt/", b"", None),
        ("missing.txt", None, "No such file"),
        ("pipe", "fifo", "it is not a file"),
    ],
)
def test_what_is_no_text_is_left_out_and_fails_nothing_else(
    tmp_path: Path, name: str, content: bytes | str | None, reason: str | None
) -> None:
    (tmp_path / "good.txt").write_text("good")
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        os.mkfifo(path)
    texts, left_out = read_files([path, tmp_path / "good.txt"])
    assert list(texts.values()) == ["good"]
    assert list(left_out) == ([] if reason is None else [path])
    assert reason is None or re.match(reason, left_out[path])
    # As in a folder, which has no pipe, and none that is not there.
    assert list(read_files([tmp_path])[0].values()) == ["good"]


def test_of_what_is_no_text_only_the_beginning_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "zeros.txt", "wb") as file:
        file.truncate(2**40)
    assert not read_files([tmp_path])[0]


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


def test_what_a_link_leads_to_is_a_file_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "linked").symlink_to(tmp_path / "elsewhere")
    [passage] = read(tmp_path / "notes")
    assert passage.source == str(tmp_path / "notes" / "linked" / "a.txt")
    # Once, by whichever way.
    assert len(read(tmp_path)) == 1


def test_folders_that_link_to_each_other_are_read_once(tmp_path: Path) -> None:
    names = "abcd"
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.md").write_text(name)
        (tmp_path / name / "up").symlink_to("..")
    for name, other in product(names, names):
        (tmp_path / name / other).symlink_to(Path("..") / other)
    (tmp_path / "a" / "self.md").symlink_to("self.md")
    assert sorted(passage.text for passage in read(tmp_path)) == list(names)
