"""The prompts of a synthesizer's calls, and what their responses say."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import (
    LLMPredictEndEvent,
    LLMPredictStartEvent,
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.prompts import BasePromptTemplate

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.errors import PromptTooLongError
from llama_index_cacheblend.calls import ModelResponse, text_of
from llama_index_cacheblend.context import ContextPrompt, make_context_prompt
from llama_index_cacheblend.decoding import check_length
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.rounds import Rounds
from llama_index_cacheblend.structured import AnswerParser, asking_for, check_mode

__all__ = ["Prompting"]

dispatcher = get_dispatcher(__name__)
logger = logging.getLogger(__name__)

# Nodes that a warning names.
_SHOWN = 5


class Prompting:
    """Makes the prompt of each call and reads its response, and tells LlamaIndex's listeners what its own methods would.

    Parameters
    ----------
    model : BlendLLM
        The model.
    text_qa_template, refine_template : BasePromptTemplate
        The templates of the first call and of those after it; they may be replaced.
    output_cls : type, optional
        What an answer is an object of; by default it is text.
    refines : bool
        Whether chunks for which a call has no room are left to the next one, or dropped.
    limited_by : PromptHelper, optional
        Its ``context_window`` less its ``num_output`` limits a prompt, where that is less than the model has room for.
    keeps_head : bool
        Whether the KV of a template's own words before the context is kept.

    Raises
    ------
    ConfigError
        If the model's ``max_new_tokens`` leave no room for a prompt, or it cannot be asked for objects in the way that is set.
    """

    def __init__(
        self,
        model: BlendLLM,
        text_qa_template: BasePromptTemplate,
        refine_template: BasePromptTemplate,
        *,
        output_cls: type[BaseModel] | None,
        refines: bool,
        limited_by: PromptHelper | None,
        keeps_head: bool = True,
    ) -> None:
        if output_cls is not None:
            check_mode(model.pydantic_program_mode)
        check_length(model.max_new_tokens, model.engine.window)
        self._model = model
        self.text_qa_template = text_qa_template
        self.refine_template = refine_template
        self._output_cls = output_cls
        self._refines = refines
        self._limited_by = limited_by
        self._keeps_head = keeps_head

    @property
    def parses(self) -> bool:
        """Whether the model or a template has an output parser."""
        parsers = (self._model.output_parser, self.text_qa_template.output_parser, self.refine_template.output_parser)
        return any(parsers)

    def prompt(self, rounds: Rounds) -> ContextPrompt | None:
        """Return the prompt of the next call; None where the answer so far leaves no room for any chunk that is left.

        Raises
        ------
        PromptTooLongError
            If it is the first call, and there is room for no chunk, or not even for the question.
        """
        template = self.text_qa_template if rounds.answer is None else self.refine_template
        asked = template if self._output_cls is None else asking_for(template, self._output_cls)
        try:
            prompt = make_context_prompt(
                self._model,
                asked,
                rounds.chunks,
                rounds.variables(),
                variable=rounds.variable,
                limit=self._limit(),
                refines=self._refines,
                structured=self._output_cls is not None,
                keeps_head=self._keeps_head,
            )
        except PromptTooLongError:
            if not rounds.earlier_calls:
                raise
            self._warn(rounds.chunks, rounds)
            return None
        if prompt.dropped:
            self._warn(prompt.dropped, rounds)
        shown = {**rounds.variables(), rounds.variable: prompt.context}
        if self._output_cls is None:
            dispatcher.event(LLMPredictStartEvent(template=template, template_args=shown))
            self._model._log_template_data(template, **shown)
        else:
            dispatcher.event(
                LLMStructuredPredictStartEvent(output_cls=self._output_cls, template=template, template_args=shown)
            )
        return prompt

    def answer(self, response: ModelResponse) -> str | BaseModel:
        """Return what a call's response says: text, or the object that was asked for.

        Raises
        ------
        StructuredOutputError
            If an object was asked for, and the model wrote something else.
        """
        text = text_of(response)
        if self._output_cls is not None:
            answer = AnswerParser(self._output_cls).parse(text)
            dispatcher.event(LLMStructuredPredictEndEvent(output=answer))
            return answer
        output = self._model._parse_output(text)
        dispatcher.event(LLMPredictEndEvent(output=output))
        return output

    def _warn(self, dropped: Sequence[Chunk], rounds: Rounds) -> None:
        ids = [chunk.id for chunk in dropped]
        logger.warning(
            "the prompt has no room for %d of %d chunks, %s%s; %s, or lower max_new_tokens=%d",
            len(ids),
            len(rounds.chunks),
            ids[:_SHOWN],
            f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else "",
            "split documents into shorter chunks"
            if self._refines
            else 'retrieve fewer or shorter ones, give BlendSynthesizer overflow="refine"',
            self._model.max_new_tokens,
        )

    def _limit(self) -> int | None:
        """Return how many tokens a prompt may have."""
        window = self._model.engine.window
        check_length(self._model.max_new_tokens, window)
        limits = [] if window is None else [window - self._model.max_new_tokens]
        if self._limited_by is not None:
            limits.append(self._limited_by.context_window - self._limited_by.num_output)
        return min(limits, default=None)
