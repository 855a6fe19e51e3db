"""Adding the response mode "blend" to LlamaIndex."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.response_synthesizers import factory
from llama_index.core.response_synthesizers.base import BaseSynthesizer

from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.chat import BlendCondensePlusContextChatEngine, BlendContextChatEngine
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["RESPONSE_MODE", "install", "synthesizer_for", "uninstall"]

RESPONSE_MODE = "blend"
"""The response mode that `install` makes known."""

_REFUSED = ("program_factory", "structured_answer_filtering", "multimodal")
_TAKEN = "llm text_qa_template refine_template output_cls streaming callback_manager prompt_helper".split()

_CHATS: dict[Any, Any] = {
    ContextChatEngine: BlendContextChatEngine,
    CondensePlusContextChatEngine: BlendCondensePlusContextChatEngine,
}
"""LlamaIndex's chat engines, and what blends in their place."""

_factory: Any = factory.get_response_synthesizer
# The same function with its own code, whatever code LlamaIndex's has.
_original = FunctionType(
    _factory.__code__, _factory.__globals__, _factory.__name__, _factory.__defaults__, _factory.__closure__
)
_from_defaults = {theirs: vars(theirs)["from_defaults"] for theirs in _CHATS}
_lock = threading.Lock()


def install() -> None:
    """Enable ``response_mode="blend"`` in LlamaIndex, in this process, until `uninstall`.

    LlamaIndex has no registry of response modes, so the code of its function `get_response_synthesizer` is replaced, by whatever
    name a module holds it. All other modes go to what was there. The chat modes "context", "condense_plus_context" and "best" of
    ``index.as_chat_engine`` take ``response_mode="blend"``, too. Calling it twice changes nothing.
    """
    with _lock:
        _factory.__code__ = _ours.__code__
        _factory.__wrapped__ = _original
        for theirs, ours in _CHATS.items():
            theirs.from_defaults = _or_ours(theirs, ours, _from_defaults[theirs].__func__)


def uninstall() -> None:
    """Undo `install`; without an earlier `install` it does nothing."""
    with _lock:
        _factory.__code__ = _original.__code__
        vars(_factory).pop("__wrapped__", None)
        for theirs, from_defaults in _from_defaults.items():
            theirs.from_defaults = from_defaults


def _ours(*args: Any, **kwargs: Any) -> BaseSynthesizer:
    # This code runs among the globals of LlamaIndex's module, where our names are unknown.
    from llama_index_cacheblend.install import synthesizer_for

    return synthesizer_for(*args, **kwargs)


def synthesizer_for(*args: Any, **kwargs: Any) -> BaseSynthesizer:
    """Return what LlamaIndex's function returns, which takes the same arguments, or a `BlendSynthesizer` for our mode."""
    given = inspect.signature(_original).bind(*args, **kwargs).arguments
    if given.get("response_mode") != RESPONSE_MODE:
        made: BaseSynthesizer = _original(*args, **kwargs)
        return made
    for name in _REFUSED:
        if given.get(name):
            raise ConfigError(
                f"{name} cannot be combined with response_mode={RESPONSE_MODE!r}, which asks about texts alone; use compact mode"
            )
    return BlendSynthesizer(**{name: given[name] for name in _TAKEN if name in given})


def _or_ours(theirs: type, ours: Any, original: Callable[..., Any]) -> classmethod[Any, Any, Any]:
    """Return a `from_defaults` that makes our chat engine where it is given our response mode, as `index.as_chat_engine` does."""

    @functools.wraps(original)
    def from_defaults(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is theirs and kwargs.get("response_mode") == RESPONSE_MODE:
            return ours.from_defaults(*args, **kwargs)
        return original(cls, *args, **kwargs)

    return classmethod(from_defaults)
