"""The form of the prompts that the model of the tests has learnt, and the value in its answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FORM", "PromptForm", "value_of"]


@dataclass(frozen=True)
class PromptForm:
    """The text before the first chunk (without BOS), between chunks, between the last one and the question, and after it."""

    head: str
    separator: str
    middle: str
    tail: str

    def prefix(self) -> str:
        """Return the text before the first chunk, BOS included."""
        return "<s>" + self.head

    def suffix(self, question: str) -> str:
        """Return the text after the last chunk."""
        return self.middle + question + self.tail

    def render(self, chunks: Sequence[str], question: str) -> str:
        """Return the whole prompt, BOS included."""
        return self.prefix() + self.separator.join(chunks) + self.suffix(question)


FORM = PromptForm(
    "<|user|>\nAnswer the question from the context only.\n\n", "\n", "\n\nQuestion: ", "\n<|assistant|>\n"
)
"""As the chat template renders it."""

_VALUE = re.compile(
    r".*\b(?:born in|lives in|works for|is a|keeps a|is based in|makes|founded by|called|is) (?P<value>.+?)\.?\s*",
    re.DOTALL,
)


def value_of(sentence: str) -> str:
    """Return the value at the end of a sentence that the model answers with."""
    found = _VALUE.fullmatch(sentence.strip())
    return found["value"] if found else sentence.strip().rstrip(".")
