"""Text that is generated: its pieces, token by token, and where it ends at stop strings, whole or piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Sequence

__all__ = ["Spelling", "StopCutter", "acut_pieces", "cut_at_stop", "cut_pieces"]

# What a decoder writes for the bytes of a character that is not whole.
_UNFINISHED = "\ufffd"
# No character takes more tokens than it has bytes in UTF-8; after more the bytes are no text.
_MOST_TOKENS = 4


class Spelling:
    """Spells tokens out one after the other: all pieces together are the text of all tokens.

    A token may be written otherwise at the beginning of a text (without its space), so each is read after those before it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The tokens after which the next are read, whose text is known, and those whose text is not complete.
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


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to where the first of the stop strings in it begins, none of which is empty."""
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]


class StopCutter:
    """Cuts a text that comes in pieces where `cut_at_stop` cuts the whole.

    What may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._done = False

    def feed(self, piece: str) -> str:
        """Take the next piece and return what can be shown by now."""
        if self._done:
            return ""
        text = self._held + piece
        cut = len(cut_at_stop(text, self._stops))
        begun = min((_begun(text, stop) for stop in self._stops), default=len(text))
        # A longer stop string may have begun before one that is complete, and would then count.
        self._done = cut < len(text) and cut <= begun
        shown = min(cut, begun)
        self._held = "" if self._done else text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what of the text held back belongs to it, now that nothing follows."""
        held, self._held = self._held, ""
        return cut_at_stop(held, self._stops)


def cut_pieces(pieces: Iterable[str], stops: Sequence[str]) -> Generator[str, None, None]:
    """Yield pieces of a text up to the first stop string."""
    cutter = StopCutter(stops)
    for piece in pieces:
        if shown := cutter.feed(piece):
            yield shown
    if shown := cutter.flush():
        yield shown


async def acut_pieces(pieces: AsyncIterable[str], stops: Sequence[str]) -> AsyncGenerator[str, None]:
    """Async version of `cut_pieces`."""
    cutter = StopCutter(stops)
    async for piece in pieces:
        if shown := cutter.feed(piece):
            yield shown
    if shown := cutter.flush():
        yield shown


def _begun(text: str, stop: str) -> int:
    """Return where the end of `text` begins that is the beginning of `stop`; the length of `text` if there is none."""
    for start in range(max(len(text) - len(stop) + 1, 0), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)
