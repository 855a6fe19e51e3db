"""How a tokenizer reads the texts of a prompt: one that begins it or goes on, a template's words or what was said."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cacheblend_rag.chunk import check_text
from cacheblend_rag.stops import Thinking

__all__ = ["MARK", "Lexer", "lexer_of"]

MARK = "\ufdd0\ufdd1"
"""Stands inside what would be read as a control token, in text that was said. Unicode has no such characters."""

# Text that goes on is read after one of these, whose tokens are taken off again.
_GUARDS = ("\n", ",", "|", ";")


class Lexer:
    """Makes tokens of texts and texts of tokens, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.state = len(tokenizer), getattr(tokenizer, "chat_template", None)
        self._tokenizer = weakref.proxy(tokenizer)
        self._is_fast = bool(getattr(tokenizer, "is_fast", False))
        spelled = str(self.state[1] or "")
        # A word that was added is no control token, though a template may use it too.
        controls = {
            text: id
            for id, token in tokenizer.added_tokens_decoder.items()
            if (text := str(token)) and (token.special or (text in spelled and not text.replace(" ", "a").isalnum()))
        }
        self.controls = frozenset(controls.values())
        self.thoughts = Thinking.of(spelled)
        marks = () if self.thoughts is None else (self.thoughts.opens, self.thoughts.closes, self.thoughts.named)
        shown = {controls[mark] for mark in marks if mark in controls}
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        # The special tokens that no text has, where that is not all of them.
        self._silent = special - shown if special & shown else None
        rests: dict[str, list[str]] = {}
        for text in sorted(controls):
            rests.setdefault(re.escape(text[0]), []).extend([re.escape(text[1:])] if text[1:] else [])
        spellings = (f"{first}(?={'|'.join(others)})" for first, others in rests.items() if others)
        # Some tokenizers lower the letters before they look for tokens.
        self._control = re.compile("|".join(spellings) or "(?!)", re.IGNORECASE)
        self._guards: list[tuple[str, list[int]]] = [("", [])]
        self._guards = [*self._probed(), ("", [])]
        self.has_prefix = len(self._guards) > 1
        self._before = tokenizer.decode(self._guards[0][1])

    def _probed(self) -> list[tuple[str, list[int]]]:
        """Return guards and their tokens, if the tokenizer reads a text otherwise where it goes on."""
        found, differs = [], False
        for guard in _GUARDS:
            known, both = self.read(guard)[0], self.read(f"{guard}a")[0]
            # Where it is not known it might be one token with what follows.
            if known and guard in self._tokenizer.decode(known) and both[: len(known)] == known:
                found.append((guard, known))
                differs = differs or both[len(known) :] != self.read("a")[0]
        return found if differs else []

    def said(self, value: Any) -> Any:
        """Return a text, or all texts in lists and mappings, with marks, so that none of it is read as a control token."""
        if isinstance(value, str):
            return self._control.sub(rf"\g<0>{MARK}", value)
        if isinstance(value, Mapping):
            return {self.said(name): self.said(each) for name, each in value.items()}
        return [self.said(each) for each in value] if isinstance(value, list | tuple) else value

    def read(self, text: str, *, begins: bool = False, placed: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens of a text that goes on, or begins a prompt; if `placed` also where each ends, marks not counted."""
        # What is too long is refused where it is too long, and by a better message than the tokenizer's warning.
        options = {"add_special_tokens": False, "verbose": False, "return_offsets_mapping": placed and self._is_fast}
        if not text.isascii():
            check_text(text)
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        for part in filter(None, text.split(MARK)):
            for guard, known in self._guards[-1:] if begins and not start else self._guards:
                encoding = self._tokenizer(guard + part, **options)
                if encoding["input_ids"][: len(known)] == known:
                    break
            ids += encoding["input_ids"][len(known) :]
            offsets = encoding.get("offset_mapping", ())[len(known) :]
            ends += [start + stop - len(guard) for _, stop in offsets]
            start += len(part)
        return ids, ends

    def count(self, text: str) -> int:
        """Return how many tokens a chunk of a text has."""
        return len(self.read(self.said(text))[0])

    def thinking(self, prompt: Sequence[Any]) -> Thinking | None:
        """Return how the answer to a prompt of these segments is told from thoughts; None of a model that has none."""
        known, end = self.thoughts, prompt[-1] if prompt else ""
        if known is None:
            return None
        text = self.text(end[-16:]) if isinstance(end, list | tuple) else str(end)
        is_open, is_over = map(text.rstrip().endswith, (known.opens, known.closes))
        return replace(known, is_open=is_open, is_over=is_over, read=lambda text: self.read(text)[0])

    def text(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens that go on after others, with the blank that it may begin with."""
        known = self._guards[0][1]
        if skip_special_tokens and self._silent is not None:
            ids, skip_special_tokens = [id for id in ids if id not in self._silent], False
        text: str = self._tokenizer.decode([*known, *ids], skip_special_tokens=skip_special_tokens)
        return text[len(self._before) :]

    def texts(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Return what `text` does of many; the fast tokenizers do it in one go, without a Python loop over the tokens."""
        if not self._is_fast:
            return list(map(self.text, many))
        sequences = [[*self._guards[0][1], *ids] for ids in many]
        decoded = self._tokenizer.backend_tokenizer.decode_batch(sequences, skip_special_tokens=False)
        return [text[len(self._before) :] for text in decoded]


_lexers: weakref.WeakKeyDictionary[Any, Lexer] = weakref.WeakKeyDictionary()


def lexer_of(tokenizer: Any) -> Lexer:
    """Return the lexer of a tokenizer as that is now."""
    lexer = _lexers.get(tokenizer)
    if lexer is None or lexer.state != (len(tokenizer), getattr(tokenizer, "chat_template", None)):
        lexer = _lexers[tokenizer] = Lexer(tokenizer)
    return lexer
