"""Settings that a command writes into somebody's YAML file, and the file of questions it reads."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments.cli.calibrate import read_questions, write_settings
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError

CHANGES = st.fixed_dictionaries(
    {"recompute_ratio": st.floats(0, 1)},
    optional={
        "selector": st.text(max_size=8),
        "enabled": st.booleans(),
        "context": st.sampled_from(["none", "document"]),
    },
)
LINES = [
    "recompute_ratio: 0.3  # a guess",
    "selector:   hkvd",
    "enabled:",
    "ttl_s: !!float 0.2",
    "ttl_s: 1\r",
    "context: 'none'\r",
    "preamble:\n  - 1\n  - 2  # two",
    "preamble: |\n  Read this.\n  And this.",
    "device: 'cpu' # here",
    "# recompute_ratio: 0.9",
    "",
]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(LINES), max_size=8), CHANGES)
def test_comments_and_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], changes: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("settings") / "blend.yaml"
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(text.encode())
    write_settings(path, changes)
    edited = path.read_bytes().decode()
    assert yaml.safe_load(edited) == (yaml.safe_load(text) or {}) | changes
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in changes]
    assert [line for line in edited.splitlines() if line in kept and line] == [line for line in kept if line]
    assert edited.count("# ") >= text.count("# ")


def test_the_file_is_replaced_and_stays_what_it_was(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_bytes("# für uns\r\nrecompute_ratio: 0.3".encode())
    real.chmod(0o640)
    link = tmp_path / "blend.yaml"
    link.symlink_to(real)
    write_settings(link, {"recompute_ratio": 0.05, "enabled": True})
    assert link.is_symlink()
    assert real.read_bytes() == "# für uns\r\nrecompute_ratio: 0.05\nenabled: true\n".encode()
    assert real.stat().st_mode & 0o777 == 0o640
    assert BlendConfig.from_yaml(link).recompute_ratio == 0.05
    assert sorted(os.listdir(tmp_path)) == ["blend.yaml", "real.yaml"]


NOT_LINES = [b"- 1", b"{ttl_s: 1}", b"  ttl_s: 1\n", b"ttl_s: 1\n...\n", b"recompute_ratio:\n  0.1\n", b"a: [", b"\xff"]


@pytest.mark.parametrize("text", NOT_LINES)
def test_a_bad_file_is_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "blend.yaml"
    path.write_bytes(text)
    for each in (path, tmp_path / "none" / "blend.yaml"):
        with pytest.raises(ConfigError):
            write_settings(each, {"recompute_ratio": 0.05})
    assert path.read_bytes() == text
    assert os.listdir(tmp_path) == ["blend.yaml"]


# Surrogates cannot be written; the others end a line of text, or are white space at its ends.
QUESTIONS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1).filter(str.strip),
    min_size=1,
    max_size=6,
)


@given(questions=QUESTIONS, bom=st.booleans(), form=st.sampled_from(["string", "question"]), gap=st.booleans())
def test_questions_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, questions: list[str], bom: bool, form: str, gap: bool
) -> None:
    folder = tmp_path_factory.mktemp("questions")
    encoding = "utf-8-sig" if bom else "utf-8"
    wanted = list(dict.fromkeys(question.strip() for question in questions))
    lines = [json.dumps(q if form == "string" else {form: q, "answer": 1}, ensure_ascii=False) for q in questions]
    between = "\n\n" if gap else "\n"
    (folder / "q.jsonl").write_text(between.join(lines), encoding=encoding)
    answer = None if form == "string" else "1"
    assert read_questions(folder / "q.jsonl") == dict.fromkeys(wanted, answer)
    if not questions[0].startswith("\ufeff"):
        (folder / "q.txt").write_text(between.join(questions) + "\n", encoding=encoding)
        assert list(read_questions(folder / "q.txt")) == wanted


@given(content=st.binary(max_size=60))
def test_any_bytes_give_questions_or_one_clear_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("questions") / "q.jsonl"
    path.write_bytes(content)
    with suppress(ConfigError):
        assert all(question.strip() for question in read_questions(path))


@pytest.mark.parametrize("text", [None, " \n\n", '"a"\n{"text": "b"}', "[1", '{"question": 3}', "[" * 100_000])
def test_bad_questions(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "q.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="jsonl"):
        read_questions(path)
