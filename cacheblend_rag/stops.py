"""Text that is generated: its pieces, token by token, the thoughts in it, and where it ends at stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Spelling", "StopCutter", "Thinking", "Thought", "begun", "cut_at_stop", "cut_pieces"]

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


_CALLED = re.compile(r"to=functions\.([\w.-]+)")


class Thought(str):
    """A piece of what a model thought, among the pieces of its answer."""

    __slots__ = ()


@dataclass(frozen=True)
class Thinking:
    """What stands before and after the thoughts of a model; `named` ends the names of channels, where answers have such."""

    opens: str
    closes: str
    named: str = ""
    is_open: bool = False
    is_over: bool = False
    read: Callable[[str], Sequence[int]] = field(default=str.encode, compare=False)

    @classmethod
    def of(cls, template: str) -> Thinking | None:
        """Return what a chat template writes around thoughts, or looks for to take them out; None if there is nothing such."""
        if "<|channel|>analysis" in template:
            return cls("<|channel|>", "<|end|>", "<|message|>")
        found = re.search(r"([<\[◁])/((?:\w+:)?think)([>\]▷])", template, re.IGNORECASE)
        return found and cls("".join(found.groups()), found[0])

    def apart(self, text: str, *, is_whole: bool = True) -> tuple[str, str]:
        """Return the thoughts of an answer, and its words: of one that goes on, what is certain by now."""
        begin = self.opens * self.is_open + text.lstrip()
        if not begin.startswith(self.opens):
            return "", text if is_whole or not self.opens.startswith(begin) else ""
        if not self.named:
            thoughts, closed, words = begin.removeprefix(self.opens).partition(self.closes)
            thoughts = thoughts if closed or is_whole else thoughts[: begun(thoughts, self.closes)]
            return thoughts.strip("\n"), words.lstrip("\n")
        said = ["", ""]
        messages = begin.split(self.closes)
        for message in messages:
            name, _, body = message.partition(self.named)
            is_cut = message is messages[-1] and not is_whole
            body = body[: begun(body, self.closes)] if is_cut else body
            if (called := _CALLED.search(name)) and self.named in message:
                body = f'<tool_call>{{"name": "{called[1]}", "arguments": {body}' + "}</tool_call>" * (not is_cut)
            said["analysis" not in name] += body
        return said[0], said[1]

    def hide(self, prompt: str, but: str) -> str:
        """Return a prompt in whose thoughts no text is found any more; characters of `but` in them stay."""
        begin = f"{self.opens}analysis{self.named}" if self.named else self.opens
        thoughts = f"{re.escape(begin)}.*?{re.escape(self.closes)}"
        return re.sub(thoughts, lambda found: re.sub(f"[^{but}]", "\0", found[0]), prompt, flags=re.DOTALL)


def begun(text: str, *marks: str) -> int:
    """Return where the end of a text begins that is the beginning of one of some marks; its length if there is none."""
    starts = range(max(len(text) - max(map(len, marks), default=0) + 1, 0), len(text))
    return next((start for start in starts if any(mark.startswith(text[start:]) for mark in marks)), len(text))
