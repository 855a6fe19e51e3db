"""Thoughts that models write before they answer: how a chat template marks them, and how they are told from the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Thinking", "Thought", "begun"]

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
