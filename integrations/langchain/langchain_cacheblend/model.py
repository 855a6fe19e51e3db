"""Base of the string model and the chat model: an engine, its options, and how it is called."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, run_in_executor
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from cacheblend_rag import BlendConfig, BlendPrompt, EngineConfig
from cacheblend_rag.chat.answer import Answer, Deadline, Ending, ModelCall
from cacheblend_rag.chat.catalog import HEAD_CHARS, ChunkCatalog, catalog_of
from cacheblend_rag.chat.engines import model_engine, refuse_unknown
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.stops import Thinking
from langchain_cacheblend.calls import (
    Call,
    DecodingFields,
    checked_options,
    explain,
    generation_options,
)

__all__ = ["BlendModel"]

_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k")
# The address of a remote tier may hold a password.
_SECRET = {"remote"}
# Threads that wait cost little, but not nothing.
_MOST_THREADS = 64


class BlendModel(DecodingFields):
    """Fields and calls that `BlendLLM` and `ChatBlend` share.

    Parameters
    ----------
    model : str, optional
        A Hugging Face id, a folder, or a GGUF file.
    engine : BlendEngine or ServedEngine, or a model that has one, optional
        A ready-made engine instead of `model`, which may then be omitted or must be the engine's own.
    server : str, optional
        The address of a server (`cacheblend-rag serve`) whose engine answers, instead of `model`; its key is taken from
        ``CACHEBLEND_SERVER_KEY``.
    store : KVStore, str or Path, optional
        With `model`: where KV is kept, for example a folder; by default this process's RAM.
    model_kwargs : dict, optional
        With `model`: passed to ``AutoModelForCausalLM.from_pretrained``, for example ``device_map`` or ``quantization_config``;
        of a GGUF file options of llama.cpp, for example ``n_ctx``.
    engine_config : EngineConfig, optional
        With `model`: the settings of its engine; the `separator` is a blank line unless another is given.
    blend_config : BlendConfig, optional
        How this object's prompts are blended; by default as the engine is set.
    max_tokens, temperature, top_p, top_k : optional
        Generation options under LangChain's names; a temperature of 0 decodes greedily. By default the model's own.
    stop : list of str, optional
        Strings that end an answer, which is shown without them.
    timeout : float, optional
        Seconds after which a call ends with an `AnswerTimeoutError`: at once while it waits for the model, otherwise at its next
        token. A running prefill is not interrupted.
    generation_kwargs : dict
        Further options of transformers' ``generate``.
    min_chunk_chars : int
        Stored chunks shorter than this are not searched for in prompts.
    max_retries, api_key : optional
        Standard parameters of LangChain for models behind a network. They have no effect here.

    Raises
    ------
    ConfigError
        If a name is unknown or a value is invalid.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str
    engine: Engine = Field(exclude=True, repr=False)
    engine_config: EngineConfig | None = None
    blend_config: BlendConfig | None = None
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    min_chunk_chars: int = Field(default=HEAD_CHARS, ge=HEAD_CHARS)
    max_retries: int | None = Field(default=None, ge=0, exclude=True, repr=False)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)

    # How the engine was loaded, where this object did it.
    _loaded: dict[str, Any] | None = PrivateAttr(default=None)
    _catalog: ChunkCatalog = PrivateAttr()

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        engine: Any = None,
        server: str | None = None,
        engine_config: EngineConfig | Mapping[str, Any] | None = None,
        blend_config: BlendConfig | Mapping[str, Any] | None = None,
        store: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        # LangChain's classes swallow unknown names. And a misspelt one should not cost the loading of a model.
        names = {*type(self).model_fields, *signature(BlendModel.__init__).parameters} - {"self", "fields"}
        refuse_unknown(type(self).__name__, fields, names)
        generation_options(fields.get("generation_kwargs") or {})
        blend, config = _settings(blend_config, BlendConfig), _settings(engine_config, EngineConfig)
        loads = engine is None and server is None
        engine = model_engine(
            model,
            engine,
            server,
            engine_config=config,
            blend_config=blend,
            store=store,
            model_kwargs=model_kwargs,
        )
        name = engine.model_name if model is None else str(model)
        try:
            super().__init__(  # type: ignore[call-arg]
                model=name, engine=engine, engine_config=config, blend_config=blend, **fields
            )
        except (ConfigError, ValidationError) as error:
            if loads:
                engine.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from error
        self._catalog = catalog_of(engine)
        if loads:
            self._loaded = {"store": str(store) if isinstance(store, Path) else store, "model_kwargs": model_kwargs}
        elif server is not None:
            self._loaded = {"server": server}

    # What is asked

    def _call(
        self,
        prompt: BlendPrompt,
        stop: Sequence[str] | None,
        kwargs: Mapping[str, Any],
        thinking: Thinking | None = None,
    ) -> Call:
        """Merge the options of this object and of one call, which wins; `thinking` says how thoughts are told from the answer."""
        given = checked_options({**kwargs, "stop": stop})
        asked = given.pop("blend_config", None)
        blend = self.blend_config if asked is None else _settings(asked, BlendConfig)
        model = given.pop("model", None)
        if model is not None and model != self.model:
            raise ConfigError(
                f"this object answers with the model {self.model!r}, and a single call cannot use {model!r}; make another object"
            )
        ends, timeout = (
            getattr(self, name) if value is None else value
            for name, value in (("stop", given.pop("stop")), ("timeout", given.pop("timeout", None)))
        )
        own = {name: getattr(self, name) for name in _OPTIONS}
        options = generation_options(own, self.generation_kwargs, given)
        ending = Ending(tuple(ends or ()), None if timeout is None else Deadline(timeout), thinking)
        if criteria := ending.criteria(self.engine.tokenizer):
            options["stopping_criteria"] = [*options.get("stopping_criteria", ()), *criteria]
        ModelCall(self.engine, prompt, blend).note()
        return Call(prompt, ending, options | {"blend": blend, "wait_s": timeout})

    # How it is answered

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """Answer each input in a thread of its own: the engine answers together those that wait for the model."""
        if not inputs:
            return []
        most = RunnableConfig(max_concurrency=min(len(inputs), _MOST_THREADS))
        configs = [most | each for each in get_config_list(config, len(inputs))]
        return Runnable.batch(self, inputs, configs, **kwargs)  # type: ignore[arg-type]

    async def abatch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Answer each input in a task of its own; see `batch`."""
        return await Runnable.abatch(self, inputs, *args, **kwargs)  # type: ignore[arg-type]

    def _answer(self, call: Call) -> Answer:
        return call.ending.read(self.engine.generate(call.prompt, **call.options))

    async def _aanswer(self, make_call: Callable[[], Call]) -> Answer:
        # A stream, so that a cancelled task does not leave the engine busy with an answer that is not wanted any more.
        call = await run_in_executor(None, make_call)
        stream = await run_in_executor(None, self.engine.stream, call.prompt, **call.options)
        try:
            return call.ending.read(await stream.aresult())
        finally:
            stream.close()

    def _pieces(self, call: Call) -> Iterator[str | Answer]:
        """Yield the answer piece by piece, thoughts as `Thought`, and at the end the whole of it."""
        yield from call.ending.pieces(self.engine.stream(call.prompt, **call.options))

    async def _apieces(self, make_call: Callable[[], Call]) -> AsyncIterator[str | Answer]:
        call = await run_in_executor(None, make_call)
        stream = await run_in_executor(None, self.engine.stream, call.prompt, **call.options)
        async with aclosing(call.ending.apieces(stream)) as pieces:
            async for piece in pieces:
                yield piece

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> BlendModel:
        """Return a model with its own settings; the engine, which is the model itself, is shared."""
        return self.model_copy(
            update={name: deepcopy(value, memo) for name, value in vars(self).items() if isinstance(value, dict | list)}
        )

    # What LangChain asks about

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # The engine's namespace tells models of one name apart by their weights, and is part of the keys of LangChain's caches.
        return {
            "model": self.model,
            "engine": self.engine.namespace,
            "engine_config": self.engine.config.model_dump(mode="json", exclude=_SECRET),
            "blend_config": (self.blend_config or self.engine.blend).model_dump(mode="json"),
        } | {name: getattr(self, name) for name in (*_OPTIONS, "stop", "generation_kwargs", "min_chunk_chars")}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        stop = stop if stop is not None else self.stop
        kwargs = {name: value for name in ("model", *_OPTIONS) if (value := kwargs.get(name)) is not None}
        return super()._get_ls_params(stop=stop, **kwargs) | {"ls_provider": "cacheblend"}  # type: ignore[misc]

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the model's own tokenizer, without special tokens added."""
        if self.custom_get_token_ids is not None:  # type: ignore[attr-defined]  # a field of LangChain's classes
            return list(self.custom_get_token_ids(text))  # type: ignore[attr-defined]
        return list(self.engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # Serialisation

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: an object that was made with a model's name can be written down; `to_json` says when not."""
        return True

    def to_json(self) -> Any:
        """Return how this object was made, so that LangChain's ``load`` can make one like it, loading the model again.

        An object around a ready-made engine, a store object or options that are not plain values cannot be serialised, and says
        so. The address of a remote tier is left out, since it may hold a password; the environment provides it.
        """
        try:
            loaded = json.loads(json.dumps(self._loaded))
        except TypeError:
            loaded = None
        if loaded is None:
            return self.to_json_not_implemented()  # type: ignore[attr-defined]
        written = super().to_json()  # type: ignore[misc]
        for name in ("engine_config", "blend_config"):
            written["kwargs"].pop(name, None)
            if (settings := getattr(self, name)) is not None:
                written["kwargs"][name] = settings.model_dump(mode="json", exclude_unset=True, exclude=_SECRET)
        written["kwargs"] |= {name: value for name, value in loaded.items() if value}
        return written


_Settings = TypeVar("_Settings", BlendConfig, EngineConfig)


def _settings(given: _Settings | Mapping[str, Any] | None, kind: type[_Settings]) -> _Settings | None:
    """Return settings that may be given as a mapping, as in what was written down; None for None."""
    return kind(**given) if isinstance(given, Mapping) else None if given is None else kind.of(given)
