"""Text that is generated: its pieces, token by token, and where it ends at stop strings, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from cacheblend_rag.thoughts import Thinking, Thought, begun

__all__ = ["Spelling", "StopCutter", "cut_at_stop", "cut_pieces"]

# What a decoder writes for the bytes of a character that is not whole.
_UNFINISHED = "\ufffd"
# No character takes more tokens than it has bytes in UTF-8; after more the bytes are no text.
_MOST_TOKENS = 4


class Spelling:
    """Spells tokens out one after the other: all pieces together are the text of all tokens."""

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
    """Cuts a text that comes in pieces where `cut_at_stop` cuts the whole."""

    def __init__(self, stops: Sequence[str], thinking: Thinking | None = None) -> None:
        self.is_done = False
        self._stops = stops
        self._held = ""
        self._thinking = thinking
        # What has come, and of that what is known to be thoughts and words.
        self._seen, self._told = "", ("", "")

    def feed(self, piece: str, *, is_last: bool = False) -> Iterator[str]:
        """Take the next piece and yield what can be shown by now; of the last one, all that belongs to the text."""
        if self._thinking is not None:
            self._seen, before = self._seen + piece, self._told
            thoughts, words = self._told = self._thinking.apart(self._seen, is_whole=is_last)
            if thought := thoughts[len(before[0]) :]:
                yield Thought(thought)
            piece = words[len(before[1]) :]
        shown = self._cut(piece)
        if shown := shown + cut_at_stop(self._held, self._stops) * is_last:
            yield shown

    def _cut(self, piece: str) -> str:
        if self.is_done:
            return ""
        text = self._held + piece
        cut = len(cut_at_stop(text, self._stops))
        may_begin = begun(text, *self._stops)
        # A longer stop string may have begun before one that is complete, and would then count.
        self.is_done = cut < len(text) and cut <= may_begin
        shown = min(cut, may_begin)
        self._held = "" if self.is_done else text[shown:]
        return text[:shown]


def cut_pieces(pieces: Iterable[str], cutter: StopCutter) -> Generator[str, None, None]:
    """Yield pieces of a text as a cutter shows them."""
    for piece in pieces:
        yield from cutter.feed(piece)
    yield from cutter.feed("", is_last=True)
