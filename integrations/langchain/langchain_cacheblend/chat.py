"""The chat model for LangChain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from cacheblend_rag import BlendPrompt
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.grammar import Guide, after_thoughts, answer_form, json_grammar
from cacheblend_rag.chat.render import VARIABLES, around_question, knows_tools, render_chat, template_variables
from cacheblend_rag.chat.tools import ToolGate, ToolReply, call_grammar, chosen_tools, parse_calls
from cacheblend_rag.chunk import carried_prompt
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.stops import Thought
from langchain_cacheblend.calls import Call, info_of, usage_of
from langchain_cacheblend.forms import AnswerForm, as_functions, call_chunks, calls_of
from langchain_cacheblend.messages import passages, turns_of
from langchain_cacheblend.model import BlendModel

__all__ = ["ChatBlend"]

# OpenAI's word for no form at all.
_TEXT = {"type": "text"}
# Of a `ModelProfile`.
_NO_TEXT = (
    *(
        "audio_inputs",
        "image_inputs",
        "image_tool_message",
        "image_url_inputs",
        "pdf_inputs",
        "pdf_tool_message",
        "video_inputs",
    ),
    *("audio_outputs", "image_outputs", "video_outputs"),
)

_NO_TOOLS = (
    "this model's chat template has no tools; use a model that was trained to call tools, or with_structured_output(schema), "
    'which needs none with its method "json_schema"'
)


class ChatBlend(BlendModel, BaseChatModel):
    """A chat model for LangChain that blends the stored chunks it finds in a conversation.

    ::

        llm = ChatBlend(model="Qwen/Qwen2.5-0.5B-Instruct")
        store = BlendVectorStore(Chroma(embedding_function=...), engine=llm.engine)
        chain = prompt | llm

    The conversation is rendered by the model's own chat template. Documents in a message's content, blocks of type "text-plain"
    as `documents_to_blocks` makes them, become chunks directly. So do those passed as ``documents=`` in a call, which go where
    the template shows documents or else before the last user message. What a retriever's tool found for an agent is searched
    for, as everything that is said. The answer's ``response_metadata["blend"]`` says what the call cost, and its
    ``usage_metadata`` how many tokens' KV was reused. ``profile`` says what the model and its chat template can do.

    What a model thinks before it answers, between the marks of its chat template, is no part of the content: it is in
    ``additional_kwargs["reasoning_content"]`` and, as a block of type "reasoning", in ``content_blocks``.

    The parameters are those of `BlendModel`, and these; a call may give all but the first too.

    Parameters
    ----------
    streaming : bool
        Whether `invoke` streams too, for callbacks that watch tokens.
    chat_template_kwargs : dict
        Variables of the chat template.
    enable_thinking : bool, optional
        That variable of the chat template.
    reasoning_effort : str, optional
        That variable of the chat template.
    """

    streaming: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    def model_post_init(self, context: Any) -> None:
        """Refuse variables that the chat template does not read."""
        super().model_post_init(context)
        template_variables(self.engine.tokenizer, vars(self))

    def blend_prompt(
        self,
        input: LanguageModelInput,
        *,
        tools: Sequence[Any] = (),
        documents: Sequence[Document] = (),
        response_format: dict[str, Any] | None = None,
        **variables: Any,
    ) -> BlendPrompt:
        """Return the prompt that the engine is given for `input`, with the stored chunks that were found in it.

        Parameters
        ----------
        input : str, list of messages or PromptValue
            What the model is asked.
        tools : sequence of tools
            Tools that the model is told about.
        documents : sequence of Document
            Documents in addition to the conversation.
        response_format : dict, optional
            The form of the answer, as OpenAI writes it; a schema is stated in the last user message.
        **variables : Any
            ``chat_template_kwargs``, ``enable_thinking`` and ``reasoning_effort``.
        """
        messages = self._convert_input(input).to_messages()
        prompt = carried_prompt(messages, self.engine, tools=tools, documents=documents)
        if prompt is not None:
            return prompt
        shown = as_functions(tools) if tools else []
        turns = turns_of(messages)
        turns = around_question(turns, after=answer_form(response_format)[1]) or turns
        if variables or self.chat_template_kwargs or self.enable_thinking is not None or self.reasoning_effort:
            variables = template_variables(self.engine.tokenizer, vars(self), variables)
        beside = passages(documents) if documents else ()
        parts = render_chat(self.engine.tokenizer, turns, tools=shown, documents=beside, **variables)
        said = turns[-1]["content"] if turns and turns[-1]["role"] == "user" else []
        asked = "".join(part for part in said if isinstance(part, str))
        return self._catalog.prompt(self.engine, parts, self.min_chunk_chars, asked)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return how many tokens the model is given for a conversation, template included.

        A part of a conversation that the template refuses, as ``trim_messages`` asks for, is counted by its texts.
        """
        try:
            prompt = self.blend_prompt(messages, tools=tools or ())
        except PromptError:
            return sum(self.get_num_tokens(str(message.text)) for message in messages)
        return len(self.engine.prompt_layout(prompt))

    # Tools and forms

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools that it may call.

        Parameters
        ----------
        tools : sequence of tools
            Functions, `BaseTool` objects, pydantic models or dictionaries.
        tool_choice : str, dict or bool, optional
            "auto", "none", "any" (a call of any of them), or the name of one, which the model then has to call. A call that has
            to be made is constrained to the tool's schema token by token.
        strict, **kwargs
            Options of the calls; `strict` has no effect, since calls that have to be made always fit their schema.

        Raises
        ------
        ConfigError
            If the model's chat template has no tools, or `tool_choice` names none of them.
        """
        if not knows_tools(self.engine.tokenizer):
            raise ConfigError(_NO_TOOLS)
        shown = as_functions(tools)
        chosen_tools(shown, tool_choice)
        return self.bind(tools=shown, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "json_mode", "function_calling"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers are objects of a schema.

        Parameters
        ----------
        schema : dict or type
            A pydantic model (answers are its objects), a TypedDict or a JSON schema (answers are dictionaries).
        method : {"json_schema", "json_mode", "function_calling"}
            "json_schema" states the schema in the last user message and constrains the answer to it token by token;
            "json_mode" allows any JSON object, so say in the prompt which; "function_calling" turns the schema into a tool, for
            models whose template has tools. Objects have the properties that the schema names and no others, unless it says
            ``additionalProperties``.
        include_raw : bool
            Whether to return a dictionary of the message (raw), the object (parsed) and what went wrong (parsing_error) instead.
        strict, **kwargs
            Options of the calls; `strict` has no effect, since answers always fit the schema.

        Raises
        ------
        ConfigError
            If the method does not exist, part of the schema cannot be enforced, or the template has no tools.
        """
        traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        form = AnswerForm(schema)
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            llm = self.bind_tools([schema], tool_choice=name, ls_structured_output_format=traced, **kwargs)
        elif method in ("json_schema", "json_mode"):
            asked: dict[str, Any] = {"type": "json_object"}
            if method == "json_schema":
                json_schema = form.json_schema()
                json_grammar(json_schema)
                asked = {
                    "type": "json_schema",
                    "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema},
                }
            llm = self.bind(response_format=asked, ls_structured_output_format=traced, **kwargs)
        else:
            raise ConfigError(f"method={method!r} is not known; give json_schema, json_mode or function_calling")
        if not include_raw:
            return llm | RunnableLambda(form.parse)
        # A fallback would come too late for a stream, which has begun.
        return RunnableMap(raw=llm) | RunnablePassthrough.assign(
            parsed=lambda given: form.attempt(given["raw"])[0],
            parsing_error=lambda given: form.attempt(given["raw"])[1],
        )

    # How LangChain calls it

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return self._result(self._answer(self._prepared(messages, stop, kwargs)), kwargs)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return self._result(await self._aanswer(partial(self._prepared, messages, stop, kwargs)), kwargs)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        gate = ToolGate() if _callable(kwargs)[0] else None
        for piece in self._pieces(self._prepared(messages, stop, kwargs)):
            for chunk in self._chunks(piece, gate, kwargs):
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        gate = ToolGate() if _callable(kwargs)[0] else None
        async for piece in self._apieces(partial(self._prepared, messages, stop, kwargs)):
            for chunk in self._chunks(piece, gate, kwargs):
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _prepared(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Call:
        options = dict(kwargs)
        documents = options.pop("documents", None) or ()
        response_format = options.pop("response_format", None)
        offered, choice = options.pop("tools", None), options.pop("tool_choice", None)
        tools, must_call = chosen_tools(as_functions(offered or ()), choice) if offered or choice else ([], False)
        if must_call and not tools:
            raise ConfigError(f"tool_choice={choice!r:.80} asks for a call, and there are no tools; give tools")
        for name in ("strict", "parallel_tool_calls"):
            options.pop(name, None)
        grammar = answer_form(response_format)[0]
        if grammar is None and must_call:
            grammar = call_grammar(tools, self.engine.tokenizer)
        variables = {name: options.pop(name) for name in VARIABLES if name in options}
        prompt = self.blend_prompt(
            messages, tools=tools, documents=documents, response_format=response_format, **variables
        )
        lexer = lexer_of(self.engine.tokenizer)
        thinking = lexer.thoughts and lexer.thinking(prompt.segments)
        if grammar is not None:
            guide = Guide(self.engine, after_thoughts(grammar, thinking))
            options["logits_processor"] = [*(options.get("logits_processor") or ()), guide]
        return self._call(prompt, stop, options, thinking)

    def _chunks(self, piece: str | Answer, gate: ToolGate | None, kwargs: dict[str, Any]) -> list[ChatGenerationChunk]:
        if isinstance(piece, Thought):
            thought = AIMessageChunk(content="", additional_kwargs={"reasoning_content": str(piece)})
            return [ChatGenerationChunk(message=thought)]
        if isinstance(piece, str):
            shown = piece if gate is None else gate.pass_on(piece)
            return [ChatGenerationChunk(message=AIMessageChunk(content=shown))] if shown else []
        reply = ToolReply("") if gate is None else _reply(piece, kwargs)
        message = AIMessageChunk(
            content="" if gate is None else reply.text[gate.shown :],
            tool_call_chunks=call_chunks(reply),
            usage_metadata=usage_of(piece),
            response_metadata=self._metadata(piece, reply),
            chunk_position="last",
        )
        return [ChatGenerationChunk(message=message)]

    def _result(self, answer: Answer, kwargs: dict[str, Any]) -> ChatResult:
        reply = _reply(answer, kwargs) if kwargs.get("tools") else ToolReply(answer.text)
        calls, invalid = calls_of(reply)
        message = AIMessage(
            content=reply.text,
            additional_kwargs={"reasoning_content": answer.thoughts} if answer.thoughts else {},
            tool_calls=calls,
            invalid_tool_calls=invalid,
            usage_metadata=usage_of(answer),
            response_metadata=self._metadata(answer, reply),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _metadata(self, answer: Answer, reply: ToolReply) -> dict[str, Any]:
        info = info_of(answer) | ({"finish_reason": "tool_calls"} if reply.calls else {})
        return {"model_name": self.model, "model_provider": "cacheblend"} | info

    # What LangChain asks about

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return super()._identifying_params | {name: getattr(self, name) for name in VARIABLES}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # In the inherited one the stop strings of a call, given or not, stand in the place of this object's.
        stop = stop if stop is not None else self.stop
        asked = {name: value for name, value in kwargs.items() if name != "timeout"}
        return str(sorted((self._identifying_params | asked | {"stop": stop, "_type": self._llm_type}).items()))

    def _resolve_model_profile(self) -> Any:
        # The model itself and its chat template say what it can; what is no text is refused in prompts.
        tools = knows_tools(self.engine.tokenizer)
        profile = {
            "name": self.model,
            "open_weights": True,
            "text_inputs": True,
            "text_outputs": True,
            "structured_output": True,
            "temperature": True,
            "tool_calling": tools,
            "tool_choice": tools,
            "reasoning_output": lexer_of(self.engine.tokenizer).thoughts is not None,
        } | dict.fromkeys(_NO_TEXT, False)
        return profile | ({} if self.engine.window is None else {"max_input_tokens": self.engine.window})


def _callable(kwargs: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that the answer to a call may call, and whether it has to call one."""
    if not kwargs.get("tools") or kwargs.get("response_format") not in (None, _TEXT):
        return [], False
    return chosen_tools(as_functions(kwargs["tools"]), kwargs.get("tool_choice"))


def _reply(answer: Answer, kwargs: dict[str, Any]) -> ToolReply:
    """Read an answer to a call that came with tools."""
    tools, must_call = _callable(kwargs)
    is_cut, one_call = answer.finish_reason == "length", kwargs.get("parallel_tool_calls") is False
    return parse_calls(answer.text, tools, is_cut=is_cut, must_call=must_call, one_call=one_call)
