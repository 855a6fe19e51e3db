"""The string model for LangChain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.runnables.config import run_in_executor
from pydantic import PrivateAttr

from cacheblend_rag import BlendPrompt
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chunk import Segment, carried_prompt
from langchain_cacheblend.calls import Call, info_of, usage_of
from langchain_cacheblend.messages import PromptText, TextPromptValue, as_chunks, render_text
from langchain_cacheblend.model import BlendModel

__all__ = ["BlendLLM"]

# What `generate` is told about a run, as opposed to its answer.
_ABOUT_THE_RUN = ("tags", "metadata", "run_name", "run_id", "timeout")


class BlendLLM(BlendModel, BaseLLM):
    """A string model for LangChain that blends the stored chunks it finds in a prompt.

    ::

        llm = BlendLLM(model="Qwen/Qwen2.5-0.5B-Instruct")
        store = BlendVectorStore(Chroma(embedding_function=...), engine=llm.engine)
        chain = prompt | llm

    Documents among the messages of a chat prompt become chunks directly, and so do those passed as ``documents=`` in a call,
    which go before the prompt. The parameters are those of `BlendModel`. Each generation's ``generation_info["blend"]`` says
    what the call cost.
    """

    # Options of the call under way, in a copy made for it.
    _asked: dict[str, Any] = PrivateAttr(default_factory=dict)

    def blend_prompt(self, input: LanguageModelInput, *, documents: Sequence[Document] = ()) -> BlendPrompt:
        """Return the prompt that the engine is given for `input`, with the stored chunks that were found in it.

        Parameters
        ----------
        input : str, list of messages or PromptValue
            What the model is asked.
        documents : sequence of Document
            Documents that go before it.
        """
        text = input if isinstance(input, str) else self._convert_input(input).to_string()
        prompt = carried_prompt(text, self.engine, documents=documents)
        if prompt is not None:
            return prompt
        parts: list[Segment] = []
        for chunk in as_chunks(documents):
            parts += [chunk, "\n\n"]
        parts += text.parts if isinstance(text, PromptText) else [text]
        return self._catalog.prompt(self.engine, parts, self.min_chunk_chars)

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return super().generate_prompt([self._convert_input(prompt) for prompt in prompts], *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return await super().agenerate_prompt([self._convert_input(prompt) for prompt in prompts], *args, **kwargs)

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        return super(BlendLLM, self._keyed(kwargs)).generate(prompts, stop, callbacks, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        return await super(BlendLLM, self._keyed(kwargs)).agenerate(prompts, stop, callbacks, **kwargs)

    def _keyed(self, kwargs: dict[str, Any]) -> BlendLLM:
        # LangChain makes the key of a cached answer from the object alone, and would take one of another ratio or temperature.
        options = {name: value for name, value in kwargs.items() if name not in _ABOUT_THE_RUN}
        if not options:
            return self
        copy = self.model_copy()
        copy._asked = options
        return copy

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # LangChain puts the stop strings of the call in the place of this object's.
        return super()._identifying_params | {"asked": {"stop": self.stop} | self._asked}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        # Messages become one string, and LangChain would leave out what is not text: take documents along, refuse the rest.
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            return TextPromptValue.of(render_text(value.messages))
        return value

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        calls = [self._prepared(prompt, stop, kwargs) for prompt in prompts]
        if len(calls) == 1:
            return _result([self._answer(calls[0])])
        results = self.engine.generate_many([call.prompt for call in calls], **_options_of(calls))
        return _result([call.ending.read(result) for call, result in zip(calls, results, strict=True)])

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        if len(prompts) == 1:
            return _result([await self._aanswer(partial(self._prepared, prompts[0], stop, kwargs))])
        calls = [await run_in_executor(None, self._prepared, prompt, stop, kwargs) for prompt in prompts]
        results = await self.engine.agenerate_many([call.prompt for call in calls], **_options_of(calls))
        return _result([call.ending.read(result) for call, result in zip(calls, results, strict=True)])

    def _prepared(self, prompt: str, stop: list[str] | None, kwargs: dict[str, Any]) -> Call:
        options = dict(kwargs)
        documents = options.pop("documents", None) or ()
        return self._call(self.blend_prompt(prompt, documents=documents), stop, options)

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        for piece in self._pieces(self._prepared(prompt, stop, kwargs)):
            chunk = _chunk(piece)
            if run_manager is not None and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        async for piece in self._apieces(partial(self._prepared, prompt, stop, kwargs)):
            chunk = _chunk(piece)
            if run_manager is not None and chunk.text:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _options_of(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the options of calls that were made with the same; objects that keep a state for their call are each call's own."""
    own = {name: [call.options.get(name) or [] for call in calls] for name in ("stopping_criteria", "logits_processor")}
    return calls[0].options | own


def _chunk(piece: str | Answer) -> GenerationChunk:
    return (
        GenerationChunk(text=piece)
        if isinstance(piece, str)
        else GenerationChunk(text="", generation_info=_info(piece))
    )


def _info(answer: Answer) -> dict[str, Any]:
    return info_of(answer) | {"usage_metadata": dict(usage_of(answer))}


def _result(answers: list[Answer]) -> LLMResult:
    usage = [usage_of(answer) for answer in answers]
    total = {
        "prompt_tokens": sum(each["input_tokens"] for each in usage),
        "completion_tokens": sum(each["output_tokens"] for each in usage),
        "total_tokens": sum(each["total_tokens"] for each in usage),
    }
    generations = [[Generation(text=answer.text, generation_info=_info(answer))] for answer in answers]
    return LLMResult(generations=generations, llm_output={"token_usage": total})
