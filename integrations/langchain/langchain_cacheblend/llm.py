"""The string model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables.config import run_in_executor

from cacheblend_rag import BlendPrompt
from langchain_cacheblend.messages import flatten
from langchain_cacheblend.model import Answer, BlendModel, Call

__all__ = ["BlendLLM"]


class BlendLLM(BlendModel, BaseLLM):
    """A string model for LangChain that blends the stored chunks it finds in a prompt.

    ::

        llm = BlendLLM(model="reference")
        store = BlendVectorStore(Chroma(embedding_function=...), engine=llm.engine)
        chain = prompt | llm

    The parameters are those of `BlendModel`. What a call cost stands in each generation's ``generation_info["blend"]``.
    """

    def blend_prompt(self, input: LanguageModelInput) -> BlendPrompt:
        """Return the prompt that the engine is given for `input`, with the stored chunks that were found in it."""
        return BlendPrompt(segments=self._split(self._convert_input(input).to_string()))

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return super().generate_prompt([self._convert_input(prompt) for prompt in prompts], *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        return await super().agenerate_prompt([self._convert_input(prompt) for prompt in prompts], *args, **kwargs)

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        # Messages become one string, and LangChain would leave out what is not text: take documents along, refuse the rest.
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            return StringPromptValue(text=ChatPromptValue(messages=flatten(value.messages)).to_string())
        return value

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        calls = [self._prepared(prompt, stop, kwargs) for prompt in prompts]
        if len(calls) == 1:
            return _result([self._answer(calls[0])])
        return _result([self._finished(*pair) for pair in zip(calls, self._ask_all(calls), strict=True)])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if len(prompts) == 1:
            return _result([await self._aanswer(partial(self._prepared, prompts[0], stop, kwargs))])
        calls = [await run_in_executor(None, self._prepared, prompt, stop, kwargs) for prompt in prompts]
        results = await self._aask_all(calls)
        return _result([self._finished(*pair) for pair in zip(calls, results, strict=True)])

    def _prepared(self, prompt: str, stop: list[str] | None, options: dict[str, Any]) -> Call:
        return self._call(self.blend_prompt(prompt), stop, options)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in self._pieces(self._prepared(prompt, stop, kwargs)):
            if isinstance(piece, str):
                chunk = GenerationChunk(text=piece)
            else:
                chunk = GenerationChunk(text="", generation_info=_info(piece))
            if run_manager is not None and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _info(answer: Answer) -> dict[str, Any]:
    return answer.info() | {"usage_metadata": dict(answer.usage())}


def _result(answers: list[Answer]) -> LLMResult:
    usage = [answer.usage() for answer in answers]
    total = {
        "prompt_tokens": sum(each["input_tokens"] for each in usage),
        "completion_tokens": sum(each["output_tokens"] for each in usage),
        "total_tokens": sum(each["total_tokens"] for each in usage),
    }
    generations = [[Generation(text=answer.text, generation_info=_info(answer))] for answer in answers]
    return LLMResult(generations=generations, llm_output={"token_usage": total})
