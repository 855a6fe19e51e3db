"""A language model for LlamaIndex that blends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.settings import Settings
from llama_index.core.types import BaseOutputParser
from pydantic.json_schema import SkipJsonSchema

from cacheblend_rag.chat.answer import Ending, ModelCall
from cacheblend_rag.chat.catalog import catalog_of
from cacheblend_rag.chat.engines import given_engine, model_engine, offered, refuse_unknown
from cacheblend_rag.chat.grammar import Guide, after_thoughts, json_grammar
from cacheblend_rag.chat.render import VARIABLES, template_variables
from cacheblend_rag.chunk import carried_prompt
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendStream, Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import lexer_of
from llama_index_cacheblend.messages import (
    aresponses,
    as_chat,
    as_completion,
    render_messages,
    responses,
    said_at_once,
    said_messages,
)
from llama_index_cacheblend.structured import JSONAnswers

__all__ = ["BlendLLM", "blend_llm", "find_engine"]

# Options of ``generate`` by which callers constrain answers themselves.
_CONSTRAINTS = {"logits_processor", "prefix_allowed_tokens_fn"}


class BlendLLM(JSONAnswers):
    """An open-weight model in this process whose prompts may hold stored chunks.

    It is an ordinary LlamaIndex language model. Every call takes ``temperature``, ``max_new_tokens``, ``stop`` and options of
    transformers' ``generate``, which take precedence over those given here; ``blend_config``, blending settings for this call;
    ``output_cls``, a pydantic model of which the answer has to be an object as JSON; and ``blend_prompt``, the prompt as a
    `BlendPrompt`, with which the text or the messages are only shown to callbacks. A chat also takes ``chat_template_kwargs``,
    ``enable_thinking`` and ``reasoning_effort``; what its model thinks before it answers, between the marks of the chat template,
    is a `ThinkingBlock` before the text (``thinking_delta`` in a stream).

    Parameters
    ----------
    model : str or Path, optional
        A Hugging Face id, a folder, or a GGUF file.
    engine : BlendEngine or ServedEngine, or a model that has one, optional
        A ready-made engine instead of `model`, which may then be omitted or must be the engine's own.
    server : str, optional
        The address of a server (`cacheblend-rag serve`) whose engine answers, instead of `model`; its key is taken from
        ``CACHEBLEND_SERVER_KEY``.
    engine_config : EngineConfig, optional
        With `model`: the settings of its engine; the `separator` is a blank line unless another is given.
    blend_config : BlendConfig, optional
        How this object's prompts are blended; by default as the engine is set.
    store : KVStore, str or Path, optional
        With `model`: where KV is kept, for example a folder; by default this process's RAM.
    model_kwargs : dict, optional
        With `model`: passed to ``AutoModelForCausalLM.from_pretrained``, for example ``device_map`` or ``quantization_config``;
        of a GGUF file options of llama.cpp, for example ``n_ctx``.
    model_name : str, optional
        What the model is called in logs.
    temperature : float
        0, the default, decodes greedily.
    max_new_tokens : int
        Maximum tokens of an answer.
    stop : str or sequence of str
        Strings at which an answer ends; they are not part of it.
    generation_kwargs : dict, optional
        Further options of transformers' ``generate``.
    chat_template_kwargs, enable_thinking, reasoning_effort : optional
        Variables of the chat template, a dictionary, and two of them.
    is_chat_model : bool, optional
        Whether LlamaIndex should send messages; by default whether the tokenizer has a chat template.
    system_prompt, messages_to_prompt, completion_to_prompt, callback_manager, output_parser
        As for every LlamaIndex language model. Messages are written by the tokenizer's chat template unless
        `messages_to_prompt` is given. Where what was said spells a control token, such as ``</s>``, it is given to that with an
        invisible mark inside, so that the model reads it as text.

    Raises
    ------
    ConfigError
        If the arguments contradict each other, or a value is invalid.
    """

    model_name: str = Field(description="What the model is called in logs.")
    temperature: float = Field(description="0 decodes greedily.")
    max_new_tokens: int = Field(description="Maximum tokens of an answer.")
    stop: list[str] = Field(description="Strings at which an answer ends.")
    generation_kwargs: dict[str, Any] = Field(description="Further options of transformers' generate.")
    chat_template_kwargs: dict[str, Any] = Field(description="Variables of the chat template.")
    is_chat_model: bool = Field(description="Whether LlamaIndex should send messages.")
    blend_config: SkipJsonSchema[BlendConfig | None] = Field(description="How its prompts are blended.")

    engine: SkipJsonSchema[Engine] = Field(exclude=True, repr=False, description="The engine that computes.")

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        engine: Any = None,
        server: str | None = None,
        engine_config: EngineConfig | None = None,
        blend_config: BlendConfig | None = None,
        store: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        model_name: str | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        generation_kwargs: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        reasoning_effort: str | None = None,
        is_chat_model: bool | None = None,
        system_prompt: str | None = None,
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        callback_manager: CallbackManager | None = None,
        output_parser: BaseOutputParser | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("BlendLLM", unknown, signature(BlendLLM.__init__).parameters)
        _, stops = _decoding_options(temperature, stop, generation_kwargs or {})
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be a whole number from 1 upwards")
        blend = None if blend_config is None else BlendConfig.of(blend_config)
        computing = model_engine(
            model,
            engine,
            server,
            engine_config=engine_config,
            blend_config=blend,
            store=store,
            model_kwargs=model_kwargs,
        )
        chat = bool(getattr(computing.tokenizer, "chat_template", None))
        given = dict(zip(VARIABLES, (chat_template_kwargs, enable_thinking, reasoning_effort), strict=True))
        variables = template_variables(computing.tokenizer, given)
        write: Any = None
        if messages_to_prompt is not None:
            write = partial(said_messages, computing.tokenizer, messages_to_prompt)
        elif chat:
            write = partial(render_messages, computing.tokenizer, own={VARIABLES[0]: variables} if variables else {})
        values: dict[str, Any] = {
            "model_name": model_name or computing.model_name,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "stop": stops,
            "generation_kwargs": generation_kwargs or {},
            "chat_template_kwargs": variables,
            "is_chat_model": chat if is_chat_model is None else is_chat_model,
            "blend_config": blend,
            "system_prompt": system_prompt,
            "messages_to_prompt": write,
            "completion_to_prompt": completion_to_prompt,
            "callback_manager": callback_manager or CallbackManager([]),
            "output_parser": output_parser,
            "engine": computing,
        }
        super().__init__(**values)

    def __getstate__(self) -> Any:
        # LlamaIndex's own would leave out the engine, and the copy would say so only when it is asked.
        raise ConfigError(
            "a BlendLLM holds the model, which cannot be copied or sent to another process; create one there"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> BlendLLM:
        """Return a model with its own settings; the engine, which is the model itself, is shared."""
        copied = self.model_copy()
        for name in ("stop", "generation_kwargs", "chat_template_kwargs"):
            setattr(copied, name, deepcopy(getattr(self, name), memo))
        return copied

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex records this class."""
        return "BlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Model metadata that LlamaIndex needs."""
        return LLMMetadata(
            context_window=self.engine.window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_new_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.model_name,
        )

    def render(
        self, template: BasePromptTemplate, structured: bool = False, **values: Any
    ) -> tuple[str, list[ChatMessage] | None]:
        """Return a filled template as text, and the messages it was written from if this is a chat model.

        It is filled as by `predict`, or by `structured_predict`, which has no use for this model's own output parser.
        """
        if not self.is_chat_model:
            if structured:
                return self._worded(template.format(llm=self, **self._said(values)), False), None
            return self._get_prompt(template, **values), None
        if structured:
            messages = self._extend_messages(template.format_messages(llm=self, **values))
        else:
            messages = self._get_messages(template, **values)
        assert self.messages_to_prompt is not None
        return self.messages_to_prompt(messages), messages

    def _said(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values of a template for completions, which alone may write control tokens."""
        said = lexer_of(self.engine.tokenizer).said
        return {name: said(value) if isinstance(value, str) else value for name, value in values.items()}

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super()._get_prompt(prompt, **self._said(prompt_args))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue `prompt`, which is given to the model unchanged, after a BOS; it may write control tokens."""
        arguments, ending = self._request(self._worded(prompt, formatted), kwargs)
        return as_completion(said_at_once(ending.read(self.engine.generate(**arguments)), ending))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages."""
        arguments, ending = self._request(messages, kwargs)
        return as_chat(said_at_once(ending.read(self.engine.generate(**arguments)), ending))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue `prompt` piece by piece; the last response carries the token usage."""
        return responses(*self._stream(self._worded(prompt, formatted), kwargs), as_completion)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer chat messages piece by piece; the last response carries the token usage."""
        return responses(*self._stream(messages, kwargs), as_chat)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete asynchronously; see `complete`. Cancelling ends the generation."""
        stream, ending = await self._astream(self._worded(prompt, formatted), kwargs)
        with closing(stream):
            return as_completion(said_at_once(ending.read(await stream.aresult()), ending))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer asynchronously; see `chat`. Cancelling ends the generation."""
        stream, ending = await self._astream(messages, kwargs)
        with closing(stream):
            return as_chat(said_at_once(ending.read(await stream.aresult()), ending))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Complete piece by piece, asynchronously; see `stream_complete`."""
        return aresponses(*await self._astream(self._worded(prompt, formatted), kwargs), as_completion)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer piece by piece, asynchronously; see `stream_chat`."""
        return aresponses(*await self._astream(messages, kwargs), as_chat)

    def _worded(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)

    def _request(self, given: str | Sequence[ChatMessage], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Ending]:
        """Return the engine's arguments for a call, and what ends its answer."""
        others = self.generation_kwargs | kwargs
        variables = {name: value for name in VARIABLES if (value := others.pop(name, None)) is not None}
        prompt = others.pop("blend_prompt", None) or carried_prompt(given, self.engine)
        if prompt is None:
            write: Any = self.messages_to_prompt
            if variables and not isinstance(given, str) and getattr(write, "func", None) is render_messages:
                write, variables = partial(write, asked=variables), {}
            # What agents and LlamaIndex's own synthesizers write holds the texts of nodes.
            text, last = (given, None) if isinstance(given, str) else (write(given), _asked(given))
            prompt = catalog_of(self.engine).prompt(self.engine, [text], asked=last)
        if variables:
            raise ConfigError(
                f"{', '.join(variables)} set variables of the chat template, which does not write this prompt; give them to "
                "chat, or to BlendLLM"
            )
        asked = {"prompt": prompt, "blend": others.pop("blend_config", self.blend_config)}
        output_cls = others.pop("output_cls", None)
        asked["max_new_tokens"] = others.pop("max_new_tokens", self.max_new_tokens)
        temperature, stop = others.pop("temperature", self.temperature), others.pop("stop", self.stop)
        options, stops = _decoding_options(temperature, stop, others)
        lexer = lexer_of(self.engine.tokenizer)
        is_told = lexer.thoughts is not None and not isinstance(given, str)
        thinking = lexer.thinking(prompt.segments) if is_told else None
        ending = Ending(tuple(stops), None, thinking)
        if thinking is not None and options.get("stop_strings") == stops:
            del options["stop_strings"]
            criteria = ending.criteria(self.engine.tokenizer)
            options["stopping_criteria"] = list(options.get("stopping_criteria", ())) + criteria
        if output_cls is not None and not options.keys() & _CONSTRAINTS:
            grammar = after_thoughts(json_grammar(output_cls.model_json_schema()), thinking)
            options["logits_processor"] = [Guide(self.engine, grammar)]
        ModelCall(self.engine, prompt, asked["blend"]).note()
        return asked | options, ending

    def _stream(self, given: str | Sequence[ChatMessage], kwargs: dict[str, Any]) -> tuple[BlendStream, Ending]:
        arguments, ending = self._request(given, kwargs)
        return self.engine.stream(**arguments), ending

    async def _astream(self, given: str | Sequence[ChatMessage], kwargs: dict[str, Any]) -> tuple[BlendStream, Ending]:
        # Whole answers come from streams too, because a stream can be ended from outside.
        return await asyncio.to_thread(self._stream, given, kwargs)


def _asked(messages: Sequence[ChatMessage]) -> str:
    """Return the words of a user's message that ends a conversation."""
    last = messages[-1] if messages else ChatMessage(content="")
    return (last.content or "") if last.role == MessageRole.USER else ""


def _decoding_options(
    temperature: float, stop: str | Sequence[str] | None, others: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return options of transformers' ``generate``, and the stop strings; `others`, by their own names, win."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for each in stops:
        if not isinstance(each, str) or not each:
            raise ConfigError(f"stop={stop!r} holds {each!r}; give non-empty strings")
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature={temperature!r} must be a finite number from 0 (greedy) upwards")
    options: dict[str, Any] = {"do_sample": temperature > 0}
    # Greedy decoding has no use for the sampling settings that many checkpoints bring along.
    options |= {"temperature": temperature} if temperature > 0 else {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    if stops:
        options["stop_strings"] = stops
    return options | offered(others), stops


def blend_llm(llm: Any, blend_config: BlendConfig | None = None) -> BlendLLM:
    """Return a language model that can blend, `Settings.llm` for None, with these settings; `ConfigError` if it cannot."""
    model = Settings.llm if llm is None else llm
    if not isinstance(model, BlendLLM):
        raise ConfigError(
            f"blending needs a BlendLLM, and the language model is a {type(model).__name__}; pass "
            "llm=BlendLLM(model=NAME), or set Settings.llm to one"
        )
    if blend_config is None:
        return model
    model.engine.check_blend(blend_config)
    return model.model_copy(update={"blend_config": blend_config})


def find_engine(engine: Any, server: str | None = None) -> Engine:
    """Return the engine that arguments of these names mean, by default that of ``Settings.llm``."""
    # `Settings.llm` would make a default model where none is set.
    return given_engine(Settings._llm if engine is None and server is None else engine, server)
