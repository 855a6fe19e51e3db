"""Teaching `index.as_chat_engine` to blend."""

from __future__ import annotations

from typing import Any

from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine

from llama_index_cacheblend.chat import BlendCondensePlusContextChatEngine, BlendContextChatEngine

__all__ = ["CHAT_ENGINES", "install_chat", "uninstall_chat"]

CHAT_ENGINES: dict[type, type] = {
    ContextChatEngine: BlendContextChatEngine,
    CondensePlusContextChatEngine: BlendCondensePlusContextChatEngine,
}
"""LlamaIndex's chat engines, and what blends in their place."""

_MAKE = "from_defaults"

_originals: dict[type, Any] = {}


def install_chat(response_mode: str) -> None:
    """Have LlamaIndex's chat engines make ours where they are given this ``response_mode``, as `index.as_chat_engine` does.

    Twice is once; undone by `uninstall_chat`.
    """
    for theirs, ours in CHAT_ENGINES.items():
        if theirs not in _originals:
            original = vars(theirs)[_MAKE]
            setattr(theirs, _MAKE, classmethod(_extended(theirs, ours, original.__func__, response_mode)))
            _originals[theirs] = original


def uninstall_chat() -> None:
    """Undo `install_chat`."""
    for theirs, original in _originals.items():
        setattr(theirs, _MAKE, original)
    _originals.clear()


def _extended(theirs: type, ours: Any, original: Any, response_mode: str) -> Any:
    def from_defaults(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is theirs and kwargs.get("response_mode") == response_mode:
            return ours.from_defaults(*args, **kwargs)
        return original(cls, *args, **kwargs)

    from_defaults.__doc__ = original.__doc__
    return from_defaults
