"""Files cut into passages."""

import random
from pathlib import Path

import pytest

from cacheblend_rag.documents.splitter import read_passages, split_text
from cacheblend_rag.errors import ConfigError


def words(text: str) -> int:
    return len(text.split())


def test_paragraphs_are_packed_as_far_as_they_fit() -> None:
    assert split_text("a b\n\nc d\n\ne f g\n", words, 4) == ["a b\n\nc d", "e f g"]


def test_a_heading_stays_with_what_it_is_above() -> None:
    text = "one two three\n\n# head\n\nfour five\n\n## next\nsix\n"
    assert split_text(text, words, 6) == ["one two three", "# head\n\nfour five", "## next\nsix"]


def test_a_heading_begins_no_passage_while_there_is_little() -> None:
    assert split_text("one\n\n# head\n\ntwo\n", words, 20) == ["one\n\n# head\n\ntwo"]


def test_a_block_of_code_is_one_paragraph() -> None:
    code = "```\n# no heading\n\nx = 1\n```"
    assert split_text(f"before\n\n{code}\n\nafter", words, 8) == ["before", code, "after"]


def test_what_is_too_long_is_cut_at_lines_then_sentences_then_words_then_anywhere() -> None:
    assert split_text("a b c\nd e f", words, 3) == ["a b c", "d e f"]
    assert split_text("A b. C d! E", words, 3) == ["A b.", "C d! E"]
    assert split_text("a b c d e", words, 2) == ["a b", "c d", "e"]
    assert split_text("abcdefgh", len, 3) == ["ab", "cd", "ef", "gh"]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_nothing_is_too_long(seed: int) -> None:
    rng = random.Random(seed)
    pieces = ["word", "longer", "x", ".", "\n", "\n\n", "# ", "```\n", " ", "é。", "\r\n"]
    text = "".join(rng.choice(pieces) + rng.choice(["", " "]) for _ in range(300))
    passages = split_text(text, len, 40)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(0 < len(passage) <= 40 for passage in passages)
    assert all(passage == passage.strip() for passage in passages)


@pytest.mark.parametrize("text", ["", "\n\n", "  \n\t\n"])
def test_nothing_gives_nothing(text: str) -> None:
    assert split_text(text, words, 4) == []


def test_folders_are_read_in_order_without_what_is_hidden_or_no_text(tmp_path: Path) -> None:
    for name in ("b.md", "a.txt", ".hidden.md", "picture.png", "c/d.rst", ".git/e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "latin.txt").write_bytes("Åse".encode("latin-1"))
    passages, skipped = read_passages([tmp_path], words, 10)
    assert [passage.text for passage in passages] == ["text of a.txt", "text of b.md", "text of c/d.rst"]
    assert len(skipped) == 1
    assert "latin.txt is left out: it is not UTF-8 text" in skipped[0]


def test_a_passage_keeps_its_id_when_it_moves_and_loses_it_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo\n\nthree")
    before = {passage.text: passage for passage in read_passages([file], words, 1)[0]}
    file.write_text("zero\n\none\n\ntwo!\n\nthree")
    after = {passage.text: passage for passage in read_passages([file], words, 1)[0]}
    assert after["one"].id == before["one"].id
    assert after["one"].position == before["one"].position + 1
    assert after["two!"].id != before["two"].id


def test_the_same_words_twice_are_two_passages(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same\n\nsame\n\nsame")
    passages, _ = read_passages([tmp_path], words, 1)
    assert len({passage.id for passage in passages}) == 3


def test_a_file_that_is_named_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.bin cannot be read: it is not UTF-8 text"):
        read_passages([tmp_path / "x.bin"], words, 10)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_passages([tmp_path / "y"], words, 10)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert len(read_passages([tmp_path, tmp_path / "a.txt"], words, 10)[0]) == 1


def test_what_a_link_leads_to_is_a_file_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("text")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "linked").symlink_to(tmp_path / "elsewhere")
    [passage] = read_passages([tmp_path / "notes"], words, 10)[0]
    assert passage.source == str(tmp_path / "notes" / "linked" / "a.txt")
    # Once, by whichever way.
    assert len(read_passages([tmp_path], words, 10)[0]) == 1
