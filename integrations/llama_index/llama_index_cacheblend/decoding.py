"""Generation options as LlamaIndex users give them, and stop strings cut off as they expect it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any

from cacheblend_rag.engine import BlendStream
from cacheblend_rag.errors import ConfigError

__all__ = ["StopCutter", "aread_stream", "check_length", "cut_at_stop", "decoding_options", "read_stream", "stop_list"]


def stop_list(stop: str | Sequence[str] | None) -> list[str]:
    """Return stop strings as a list.

    Raises
    ------
    ConfigError
        If one of them is empty, or no string.
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for each in stops:
        if not isinstance(each, str) or not each:
            raise ConfigError(f"stop={stop!r} holds {each!r}; give strings that are not empty")
    return stops


def decoding_options(temperature: float, stops: Sequence[str], others: dict[str, Any]) -> dict[str, Any]:
    """Return options of transformers' ``generate``.

    Parameters
    ----------
    temperature : float
        0 decodes greedily, more samples.
    stops : sequence of str
        Where the answer ends.
    others : dict
        Options of ``generate`` by their own names, which win.

    Returns
    -------
    dict
        The options.

    Raises
    ------
    ConfigError
        If the temperature is negative or not finite.
    """
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature={temperature!r} must be a finite number from 0 (greedy) upwards")
    options: dict[str, Any] = {"do_sample": temperature > 0}
    # Greedy decoding has no use for the sampling settings that many checkpoints bring along.
    options |= {"temperature": temperature} if temperature > 0 else {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    if stops:
        options["stop_strings"] = list(stops)
    return options | others


def check_length(max_new_tokens: Any, window: int | None = None) -> int:
    """Return how many tokens an answer may have.

    Raises
    ------
    ConfigError
        If it is no whole number from 1 upwards, or leaves no room for a prompt in the model's window.
    """
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be a whole number from 1 upwards")
    if window is not None and max_new_tokens >= window:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's window of {window} tokens; lower it"
        )
    return max_new_tokens


def cut_at_stop(text: str, stops: Iterable[str]) -> str:
    """Return `text` up to the stop string that is complete first, as it is met when text is generated."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return text[: min(found)[1]] if found else text


class StopCutter:
    """Cuts a stream of text at the first stop string, holding back what may be the beginning of one.

    Parameters
    ----------
    stops : sequence of str
        The stop strings.
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
        shown = cut_at_stop(text, self._stops)
        if len(shown) < len(text):
            self._done = True
            self._held = ""
            return shown
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; the stream has ended."""
        held, self._held = self._held, ""
        return held


def read_stream(stream: BlendStream, stops: Sequence[str]) -> Generator[str, None, None]:
    """Yield the text of a stream up to the first stop string; closing the generator ends the generation."""
    cutter = StopCutter(stops)
    try:
        for piece in stream:
            if shown := cutter.feed(piece):
                yield shown
        if shown := cutter.flush():
            yield shown
    finally:
        stream.close()


async def aread_stream(stream: BlendStream, stops: Sequence[str]) -> AsyncGenerator[str, None]:
    """Do what `read_stream` does, on an event loop."""
    cutter = StopCutter(stops)
    try:
        async for piece in stream:
            if shown := cutter.feed(piece):
                yield shown
        if shown := cutter.flush():
            yield shown
    finally:
        stream.close()


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
