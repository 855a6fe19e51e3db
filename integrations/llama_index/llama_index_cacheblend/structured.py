"""Answers that are objects: what the model is asked to write, and what it wrote."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.llm import LLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.program.utils import FlexibleModel
from llama_index.core.prompts import BasePromptTemplate

from cacheblend_rag.errors import StructuredOutputError

__all__ = ["AnswerParser", "JSONAnswers", "asking_for"]

dispatcher = get_dispatcher(__name__)

M = TypeVar("M", bound=BaseModel)

Options = dict[str, Any] | None

_SHOWN = 200


class AnswerParser(PydanticOutputParser[M]):
    """LlamaIndex's parser, whose errors say what the model wrote and what can be done."""

    def parse(self, text: str) -> M:
        """Return the object that `text` holds as JSON; `StructuredOutputError` if it holds none, or another one."""
        try:
            answer: M = super().parse(text)
        except ValueError as error:
            raise _refusal(self.output_cls, text) from error
        return answer


def asking_for(template: BasePromptTemplate, output_cls: type[BaseModel]) -> BasePromptTemplate:
    """Return a copy of a template that also shows the model the schema of its answer, as LlamaIndex's own program does."""
    copy = template.partial_format()
    copy.output_parser = AnswerParser(output_cls)
    return copy


class JSONAnswers(LLM):
    """A language model that is asked for objects as JSON, which its answers are constrained to."""

    def structured_predict(
        self, output_cls: type[M], prompt: BasePromptTemplate, llm_kwargs: Options = None, **prompt_args: Any
    ) -> M:
        """Answer a template with an object, which the model writes as JSON.

        `ConfigError` if its schema cannot be enforced; `StructuredOutputError` if what it writes is not such an object, being
        cut off.
        """
        program = self._program(output_cls, prompt, prompt_args)
        answer = program(llm_kwargs=_forming(output_cls, llm_kwargs), **prompt_args)
        dispatcher.event(LLMStructuredPredictEndEvent(output=answer))
        return answer

    async def astructured_predict(
        self, output_cls: type[M], prompt: BasePromptTemplate, llm_kwargs: Options = None, **prompt_args: Any
    ) -> M:
        """Answer asynchronously; see `structured_predict`."""
        program = self._program(output_cls, prompt, prompt_args)
        answer = await program.acall(llm_kwargs=_forming(output_cls, llm_kwargs), **prompt_args)
        dispatcher.event(LLMStructuredPredictEndEvent(output=answer))
        return answer

    def stream_structured_predict(
        self, output_cls: type[M], prompt: BasePromptTemplate, llm_kwargs: Options = None, **prompt_args: Any
    ) -> Generator[M | FlexibleModel, None, None]:
        """Yield what is known of the object so far; the last one is whole, or a `StructuredOutputError` is raised."""
        last, options = None, _forming(output_cls, llm_kwargs)
        # A copy, because LlamaIndex leaves its parser on the template that it is given.
        for last in super().stream_structured_predict(output_cls, prompt.partial_format(), options, **prompt_args):
            yield last
        _check_complete(last, output_cls)

    async def astream_structured_predict(
        self, output_cls: type[M], prompt: BasePromptTemplate, llm_kwargs: Options = None, **prompt_args: Any
    ) -> AsyncGenerator[M | FlexibleModel, None]:
        """Stream answers asynchronously; see `stream_structured_predict`."""
        partials = await super().astream_structured_predict(
            output_cls, prompt.partial_format(), _forming(output_cls, llm_kwargs), **prompt_args
        )

        async def read() -> AsyncGenerator[M | FlexibleModel, None]:
            last = None
            async for last in partials:
                yield last
            _check_complete(last, output_cls)

        return read()

    def _program(
        self, output_cls: type[M], prompt: BasePromptTemplate, args: dict[str, Any]
    ) -> LLMTextCompletionProgram[M]:
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=args))
        # A copy, because the program leaves its parser on the template that it is given.
        return LLMTextCompletionProgram(AnswerParser(output_cls), output_cls, prompt.partial_format(), self)


def _forming(output_cls: type[BaseModel], llm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the options of a call whose answer is to be an object."""
    return {"output_cls": output_cls, **(llm_kwargs or {})}


def _refusal(output_cls: type[BaseModel], text: str) -> StructuredOutputError:
    """Return the error for an answer that is not a valid `output_cls`."""
    return StructuredOutputError(
        f"the model's answer is not a valid {output_cls.__name__}: {text[:_SHOWN]!r}. Raise max_new_tokens if the answer is cut "
        "off, or leave out what else constrains it in generation_kwargs",
        text,
    )


def _check_complete(last: Any, output_cls: type[BaseModel]) -> None:
    """Raise `StructuredOutputError` if the last object of a stream is still a partial one."""
    if not isinstance(last, output_cls):
        raise _refusal(output_cls, last.model_dump_json() if isinstance(last, BaseModel) else str(last))
