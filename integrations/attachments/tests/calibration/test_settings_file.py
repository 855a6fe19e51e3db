"""Settings that a command writes into somebody's YAML file, and the file of questions it reads."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_attachments.cli.calibrate import read_questions, write_settings
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError

LINES = "recompute_ratio: {}  # a guess\nstrict: 1\r\nselector: {}\npreamble: |\n  Read this.\n  enabled: no.\ndevice: 'cpu'"


@given(ratio=st.floats(0, 1), selector=st.text(max_size=8))
def test_comments_and_lines_stay(tmp_path_factory: pytest.TempPathFactory, ratio: float, selector: str) -> None:
    path = tmp_path_factory.mktemp("settings") / "blend.yaml"
    path.write_bytes(LINES.format(0.3, "hkvd").encode())
    changes = {"recompute_ratio": ratio, "selector": selector, "enabled": True}
    write_settings(path, changes)
    edited = path.read_bytes().decode()
    assert yaml.safe_load(edited) == yaml.safe_load(LINES.format(0.3, "hkvd")) | changes
    pattern = re.escape(LINES).replace(r"\{\}", r"\S.*?")
    assert re.fullmatch(rf"(?s){pattern}\nenabled: true\n", edited)


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


NOT_LINES = [
    b"- 1",
    b"{strict: 1}",
    b"  strict: 1\n",
    b"strict: 1\n...\n",
    b"recompute_ratio:\n  0.1\n",
    b"a: [",
    b"\xff",
]


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


@pytest.mark.parametrize("text", [None, " \n\n", '"a"\n{"text": "b"}', "[1", '{"question": 3}', "[" * 100_000, "\xff"])
def test_bad_questions(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "q.jsonl"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="jsonl"):
        read_questions(path)
