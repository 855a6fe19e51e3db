"""Preamble of every chunk: the beginning of a prompt such as it will be used in."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

__all__ = ["default_preamble"]

_MARK = "\u2021content\u2021"

_DATE = re.compile(r"""strftime_now\(\s*["'](.+?)["']\s*\)""")
_ANY_DAY = datetime(2026, 1, 1)

_INSTRUCTION = "Use the following pieces of context to answer the question at the end.\n\n"


def default_preamble(tokenizer: Any) -> str:
    """Return the text that chunks are encoded after where the settings name none.

    A chunk's first tokens read as the beginning of a text when nothing stands before them: they become attention sinks, in
    every chunk of a prompt anew, and what follows is computed for a prompt of another kind than it is used in. So chunks
    are encoded after what a prompt most likely begins with: what the tokenizer's chat template writes before a user's
    words, if it has one, and an instruction. APE (section 4) shares a prefix for the first of these reasons. docs/encoding.md
    has the figures. The text is the same on every day and every machine, since it is part of every key.
    """
    return f"{_opening(tokenizer)}{_INSTRUCTION}"


def _opening(tokenizer: Any) -> str:
    """Return what a chat template writes before the words of a user; nothing where it cannot be told."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    try:
        text = str(tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False))
    except Exception:  # a template may raise what it likes
        return ""
    before, mark, _ = text.partition(_MARK)
    # Many templates write today's date, and chunks are not to be encoded again tomorrow.
    today = datetime.now()
    for form in _DATE.findall(str(template)):
        before = before.replace(today.strftime(form), _ANY_DAY.strftime(form))
    return before if mark else ""
