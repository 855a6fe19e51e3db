"""Adding the response mode "blend" to LlamaIndex."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.indices.knowledge_graph.retrievers import KGTableRetriever, KnowledgeGraphRAGRetriever
from llama_index.core.indices.property_graph import BasePGRetriever, PGRetriever
from llama_index.core.indices.struct_store.sql_retriever import NLSQLRetriever
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import factory
from llama_index.core.response_synthesizers.base import BaseSynthesizer

from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.chat import BlendCondensePlusContextChatEngine, BlendContextChatEngine
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.report import Calls
from llama_index_cacheblend.retriever import BlendRetriever
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["RESPONSE_MODE", "install", "uninstall"]

RESPONSE_MODE = "blend"
"""The response mode that `install` makes known."""

_NAME = "get_response_synthesizer"
_REFUSED = {
    "program_factory": "blending makes plain calls, without a program",
    "structured_answer_filtering": "blending makes plain calls, whose answers are not filtered",
    "multimodal": "BlendLLM reads text only",
}
_TAKEN = "llm text_qa_template refine_template output_cls streaming callback_manager prompt_helper".split()
_COMPOSED = (KGTableRetriever, KnowledgeGraphRAGRetriever, BasePGRetriever, PGRetriever, NLSQLRetriever)
"""Retrievers that write the text of their nodes anew for each query."""

CHAT_ENGINES: dict[type, type] = {
    ContextChatEngine: BlendContextChatEngine,
    CondensePlusContextChatEngine: BlendCondensePlusContextChatEngine,
}
"""LlamaIndex's chat engines, and what blends in their place."""

_CHAT = "chat achat stream_chat astream_chat".split()
_REPORTED: dict[type, list[str]] = {
    BaseSynthesizer: ["synthesize", "asynthesize"],
    BaseQueryEngine: ["query", "aquery"],
    CustomQueryEngine: ["query", "aquery"],
    **dict.fromkeys(
        [SimpleChatEngine, ContextChatEngine, CondenseQuestionChatEngine, CondensePlusContextChatEngine], _CHAT
    ),
}
"""Methods that return the responses that carry a report, whatever the response mode."""

_installed: ExitStack | None = None
"""Undoes what `install` did."""

_lock = threading.Lock()


def install() -> None:
    """Enable ``response_mode="blend"`` in LlamaIndex, in this process, until `uninstall`.

    LlamaIndex has no registry of response modes, so its function `get_response_synthesizer` is replaced wherever a module of
    LlamaIndex holds it. All other modes go to the function that was there. Calling it twice changes nothing. A module of
    yours that imported the function earlier keeps the old one. `RetrieverQueryEngine.from_args` is replaced too, by one that
    refuses retrievers that write new nodes for each query, such as those of knowledge graphs.

    The chat modes "context", "condense_plus_context" and "best" of ``index.as_chat_engine`` take ``response_mode="blend"``, too.

    From then on, answers of a `BlendLLM` have their report in ``response.metadata["blend"]``, in every response mode, query
    engine and chat engine of LlamaIndex.

    Raises
    ------
    ConfigError
        If the installed llama-index-core is not one this package can extend.
    """
    global _installed
    with _lock:
        if _installed is not None:
            return
        _check()
        with ExitStack() as undo:
            original = factory.get_response_synthesizer
            ours = _extended(original)
            # Searched again then, because modules imported in the meantime have taken ours.
            undo.callback(_replace, ours, original)
            _replace(original, ours)
            for theirs, our_engine in CHAT_ENGINES.items():
                _patch(undo, theirs, "from_defaults", _or_ours(theirs, our_engine))
            for owner, names in _REPORTED.items():
                for name in names:
                    _patch(undo, owner, name, _reporting(vars(owner)[name], is_async=name.startswith("a")))
            _patch(undo, RetrieverQueryEngine, "from_args", _refusing(vars(RetrieverQueryEngine)["from_args"].__func__))
            _installed = undo.pop_all()


def uninstall() -> None:
    """Undo `install`; without an earlier `install` it does nothing."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed.close()
            _installed = None


def _replace(function: Callable[..., BaseSynthesizer], other: Callable[..., BaseSynthesizer]) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "llama_index" and vars(module).get(_NAME) is function:
            setattr(module, _NAME, other)


def _patch(undo: ExitStack, owner: type, name: str, method: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, method)
    undo.callback(setattr, owner, name, original)


def _check() -> None:
    synthesize = "query nodes additional_source_nodes response_kwargs"
    replaced: list[tuple[Any, str, str]] = [
        (factory, _NAME, " ".join(["response_mode", *_TAKEN])),
        (RetrieverQueryEngine, "from_args", "retriever response_mode response_synthesizer"),
        (
            BaseSynthesizer,
            "__init__",
            "llm callback_manager prompt_helper chat_prompt_helper streaming output_cls empty_response",
        ),
        (BaseSynthesizer, "synthesize", synthesize),
        (BaseSynthesizer, "asynthesize", synthesize),
        *((engine, "from_defaults", "retriever chat_history memory llm") for engine in CHAT_ENGINES),
        *((owner, name, "self") for owner, names in _REPORTED.items() for name in names),
    ]
    for owner, name, names in replaced:
        # What it defines itself, since that is what is replaced.
        found = getattr(owner, name) if name in vars(owner) else None
        parameters = inspect.signature(found).parameters if found else {}
        missing = [each for each in names.split() if each not in parameters]
        if missing:
            shown = f"{owner.__name__}.{name}" if found is None else found.__qualname__
            lacks = "is not there" if found is None else f"has no parameter {', '.join(missing)}"
            raise ConfigError(
                f"llama-index-core {version('llama-index-core')} cannot be taught response_mode={RESPONSE_MODE!r}: its "
                f"{shown} {lacks}; install llama-index-core>=0.14,<0.15, or pass "
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
        return BlendSynthesizer(**{name: given[name] for name in _TAKEN if name in given})

    return get_response_synthesizer


def _or_ours(theirs: type, ours: Any) -> classmethod[Any, Any, Any]:
    """Return a `from_defaults` that makes our chat engine where it is given our response mode, as `index.as_chat_engine` does."""
    original = vars(theirs)["from_defaults"].__func__

    @functools.wraps(original)
    def from_defaults(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is theirs and kwargs.get("response_mode") == RESPONSE_MODE:
            return ours.from_defaults(*args, **kwargs)
        return original(cls, *args, **kwargs)

    return classmethod(from_defaults)


def _reporting(original: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    """Return a method whose responses carry the report of what a `BlendLLM` was asked."""

    @functools.wraps(original)
    def report(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Calls() as calls:
            response = original(self, *args, **kwargs)
        return calls.complete(response, isinstance(getattr(self, "_llm", None), BlendLLM))

    @functools.wraps(original)
    async def areport(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Calls() as calls:
            response = await original(self, *args, **kwargs)
        return calls.complete(response, isinstance(getattr(self, "_llm", None), BlendLLM))

    return areport if is_async else report


def _refusing(original: Callable[..., RetrieverQueryEngine]) -> classmethod[RetrieverQueryEngine, Any, Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def from_args(*args: Any, **kwargs: Any) -> RetrieverQueryEngine:
        given = signature.bind(*args, **kwargs).arguments
        retriever, synthesizer = given.get("retriever"), given.get("response_synthesizer")
        while isinstance(retriever, BlendRetriever):
            retriever = retriever.retriever
        mode = RESPONSE_MODE if isinstance(synthesizer, BlendSynthesizer) else given.get("response_mode")
        if mode == RESPONSE_MODE and isinstance(retriever, _COMPOSED):
            raise ConfigError(
                f"response_mode={RESPONSE_MODE!r} cannot be used with a {type(retriever).__name__}: it writes the text of its "
                "nodes anew for each query, so there is no stored KV to reuse; use compact mode for it, or retrieve the "
                "nodes of a vector index"
            )
        return original(*args, **kwargs)

    return classmethod(from_args)
