"""Teaching LlamaIndex the response mode "blend"."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

from llama_index.core.response_synthesizers import factory
from llama_index.core.response_synthesizers.base import BaseSynthesizer

from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.chat_modes import install_chat, uninstall_chat
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["RESPONSE_MODE", "install", "uninstall"]

RESPONSE_MODE = "blend"
"""The response mode that `install` makes known."""

_NAME = "get_response_synthesizer"
_USED = ("llm", "text_qa_template", "callback_manager", "streaming", "response_mode")
_REFUSED = {
    "output_cls": "structured output is not blended yet",
    "program_factory": "blending makes one plain call, without a program",
    "structured_answer_filtering": "blending makes one plain call, whose answer is not filtered",
    "multimodal": "BlendLLM reads text only",
}

_original: Callable[..., BaseSynthesizer] | None = None
_ours: Callable[..., BaseSynthesizer] | None = None
_lock = threading.Lock()


def install() -> None:
    """Make ``response_mode="blend"`` known to LlamaIndex, in this process, until `uninstall`.

    LlamaIndex has no registry of response modes, so its function `get_response_synthesizer` is replaced wherever a module of
    LlamaIndex holds it. All other modes go to the function that was there. Doing it twice changes nothing. A module of yours that
    imported the function before keeps the old one.

    The chat modes "context", "condense_plus_context" and "best" of ``index.as_chat_engine`` take ``response_mode="blend"``, too.

    Raises
    ------
    ConfigError
        If the installed llama-index-core is not one this package can extend.
    """
    global _original, _ours
    with _lock:
        if _ours is not None:
            return
        original = factory.get_response_synthesizer
        _check(original)
        ours = _extended(original)
        for module in _holders(original):
            setattr(module, _NAME, ours)
        install_chat(RESPONSE_MODE)
        _original, _ours = original, ours


def uninstall() -> None:
    """Undo `install`; without one before, nothing happens."""
    global _original, _ours
    with _lock:
        if _ours is None:
            return
        # Searched again, because modules imported in the meantime have taken ours.
        for module in _holders(_ours):
            setattr(module, _NAME, _original)
        uninstall_chat()
        _original = _ours = None


def _holders(function: Callable[..., BaseSynthesizer]) -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "llama_index" and vars(module).get(_NAME) is function:
            yield module


def _check(original: Callable[..., BaseSynthesizer]) -> None:
    parameters = inspect.signature(original).parameters
    missing = [name for name in _USED if name not in parameters]
    if missing:
        raise ConfigError(
            f"llama-index-core {version('llama-index-core')} cannot be taught response_mode={RESPONSE_MODE!r}: its {_NAME} has "
            f"no parameter {', '.join(missing)}; install llama-index-core>=0.14,<0.15, or pass "
            "response_synthesizer=BlendSynthesizer(...) yourself"
        )


def _extended(original: Callable[..., BaseSynthesizer]) -> Callable[..., BaseSynthesizer]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_response_synthesizer(*args: Any, **kwargs: Any) -> BaseSynthesizer:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("response_mode") != RESPONSE_MODE:
            return original(*args, **kwargs)
        for name, why in _REFUSED.items():
            if given.get(name):
                raise ConfigError(
                    f"{name} cannot be combined with response_mode={RESPONSE_MODE!r}: {why}; use compact mode for it"
                )
        return BlendSynthesizer(
            llm=given.get("llm"),
            text_qa_template=given.get("text_qa_template"),
            streaming=given.get("streaming", False),
            callback_manager=given.get("callback_manager"),
        )

    return get_response_synthesizer
