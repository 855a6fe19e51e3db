"""The text of tokens, as they come."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Spelling"]

# What a decoder writes for the bytes of a character that is not whole.
_UNFINISHED = "\ufffd"
# No character takes more tokens than it has bytes in UTF-8; behind so many the bytes are no text.
_MOST_TOKENS = 4


class Spelling:
    """Spells tokens out one after the other: all pieces together are the text of all tokens.

    A token may be written otherwise at the beginning of a text (without its space), so each is read behind those before it.

    Parameters
    ----------
    decode : callable
        Returns the text of tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The tokens behind which the next are read, whose text is known, and those whose text is not complete.
        self._before: list[int] = []
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that is certain with a further token: none, where a character takes more tokens."""
        self._new.append(token_id)
        text = self._text()
        if not text or (text.endswith(_UNFINISHED) and len(self._new) < _MOST_TOKENS):
            return ""
        self._before, self._new = self._new, []
        return text

    def rest(self) -> str:
        """Return the text that was not certain, at the end."""
        text = self._text()
        self._before, self._new = self._before + self._new, []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._new)[len(self._decode(self._before)) :]
