"""Options of transformers' ``generate`` as a server takes them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from cacheblend_rag.chat.answer import Deadline, EndWhenSet
from cacheblend_rag.engine.generation import StopStrings
from cacheblend_rag.errors import ConfigError

__all__ = ["Decoding", "asked_decoding"]

_DRAWN = ("temperature", "top_p", "top_k")


class Decoding(NamedTuple):
    """How an answer is written: what is sent, what ends it here, and its time limit."""

    asked: dict[str, Any]
    ends: list[threading.Event]
    deadline: Deadline | None


def asked_decoding(options: Mapping[str, Any]) -> Decoding:
    """Return options of decoding as a server takes them.

    Parameters
    ----------
    options : Mapping
        Options of transformers' ``generate``. Of stopping criteria and logits processors those of this package can be said in
        JSON: stop strings, time limits and grammars.

    Raises
    ------
    ConfigError
        If an option cannot be sent to a server.
    """
    given = {name: value for name, value in options.items() if value is not None}
    asked: dict[str, Any] = {}
    stop = given.pop("stop_strings", [])
    stops = [stop] if isinstance(stop, str) else list(stop)
    ends: list[threading.Event] = []
    deadline: Deadline | None = None
    for criterion in given.pop("stopping_criteria", ()):
        if isinstance(criterion, StopStrings):
            stops += criterion.stop
        elif isinstance(criterion, Deadline):
            deadline = criterion
        elif isinstance(criterion, EndWhenSet):
            ends.append(criterion.event)
        else:
            raise _unsendable(type(criterion).__name__)
    for processor in given.pop("logits_processor", ()):
        # A `Guide`; its class needs llguidance, which not everybody has who asks a server.
        grammar = getattr(processor, "grammar", None)
        if not isinstance(grammar, str):
            raise _unsendable(type(processor).__name__)
        asked["grammar"] = grammar
    if stops:
        asked["stop"] = stops
    drawn = {name: given.pop(name) for name in _DRAWN if name in given}
    if "do_sample" in given:
        asked["do_sample"] = bool(given.pop("do_sample"))
    # Greedy decoding has no use for them, though both frameworks' objects may say them.
    asked |= drawn if asked.get("do_sample") is not False else {}
    if given:
        raise _unsendable(", ".join(sorted(given)))
    return Decoding(asked, ends, deadline)


def _unsendable(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be sent to a server, which takes temperature, top_p, top_k, stop strings and time limits; leave it out, "
        "or use an engine of this process"
    )
