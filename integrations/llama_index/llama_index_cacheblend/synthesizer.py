"""The response synthesizer behind ``response_mode="blend"``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import (
    LLMPredictEndEvent,
    LLMPredictStartEvent,
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.settings import Settings

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import CallReport
from llama_index_cacheblend.context import ContextPrompt, make_context_prompt
from llama_index_cacheblend.llm import BlendLLM, blend_llm
from llama_index_cacheblend.nodes import node_chunks
from llama_index_cacheblend.report import REPORT_KEY, AnswerReport, annotate
from llama_index_cacheblend.structured import AnswerParser, asking_for

__all__ = ["BlendSynthesizer"]

dispatcher = get_dispatcher(__name__)
logger = logging.getLogger(__name__)

ModelResponse = ChatResponse | CompletionResponse


@dataclass
class _Rounds:
    """State of a question: what has been asked, and what is still to be asked."""

    query_str: str
    # The context that no call has read yet.
    chunks: Sequence[Chunk]
    # Further variables of the templates.
    values: dict[str, Any]
    # The answer so far.
    answer: str | None
    streams: bool
    report: AnswerReport
    # Copies of the source nodes, to be annotated with what the report says of them.
    sources: Sequence[NodeWithScore]
    earlier_calls: list[CallReport] = field(default_factory=list)
    # The ids of context that no call reads.
    dropped: list[str | None] = field(default_factory=list)

    def refine(self, prompt: ContextPrompt, response: ModelResponse, answer: str | BaseModel) -> None:
        """Go on to the chunks that the last prompt left over."""
        said = answer.model_dump_json() if isinstance(answer, BaseModel) else answer
        # LlamaIndex starts over where a model wrote nothing.
        self.answer = said or self.answer
        self.chunks = prompt.left_over
        self.earlier_calls.append(_call_report(prompt, response))

    def end(self, prompt: ContextPrompt, response: ModelResponse) -> None:
        """Fill the report; `response` is the last call's."""
        self.report.fill(_call_report(prompt, response), self.earlier_calls, self.dropped)
        annotate(self.sources, self.report)


def _call_report(prompt: ContextPrompt, response: ModelResponse) -> CallReport:
    assert response.raw is not None
    report: CallReport = response.raw["blend"]
    if prompt.fallback_reason is None:
        return report
    changed = CallReport(report | {"fallback_reason": prompt.fallback_reason})
    changed.last = report.last and replace(report.last, fallback_reason=prompt.fallback_reason)
    return changed


class BlendSynthesizer(BaseSynthesizer):
    """Answers from retrieved nodes whose KV is stored.

    The model is given the prompt that LlamaIndex's compact mode gives it. ``response.metadata["blend"]`` is an `AnswerReport`;
    for a stream it is filled when the stream ends, and it is None if nothing was retrieved. Source nodes are copies; with a
    `SourceAttention` attached to the engine their metadata have ``blend_attention``, the share of the answer's attention that
    went to the node, and ``blend_status``, why it was not blended if it was not.

    Parameters
    ----------
    llm : BlendLLM or StructuredLLM, optional
        The model, or what its ``as_structured_llm`` returned; by default ``Settings.llm``.
    text_qa_template : BasePromptTemplate, optional
        The template, with ``context_str`` and ``query_str``.
    refine_template : BasePromptTemplate, optional
        The template of the calls after the first, with ``context_msg``, ``query_str`` and ``existing_answer``. If it is given,
        nodes for which the model's window has no room go to further calls, with the answer so far; otherwise one call answers
        without them. Nodes are never cut, and stay in retrieval order; one that is too long even for a call without others is
        dropped in either case.
    output_cls : type, optional
        A pydantic model. The answer is an object of this model, which is written as JSON; it is never a stream.
    blend_config : BlendConfig, optional
        Blending settings of this synthesizer, instead of the engine's.
    streaming : bool
        Whether answers are streamed.
    callback_manager : CallbackManager, optional
        Callbacks.
    prompt_helper : PromptHelper, optional
        Its ``context_window`` less its ``num_output`` limits the prompt, if that is less than what the model's window has room
        for; by default ``Settings.prompt_helper``, if it was set.
    empty_response : str, optional
        The answer if nothing was retrieved.

    Raises
    ------
    ConfigError
        If the language model cannot blend, its ``max_new_tokens`` leave no room for a prompt, or its engine cannot be
        given `blend_config`.
    """

    # Whether templates hold nothing of a conversation.
    _keeps_head = True

    def __init__(
        self,
        llm: BlendLLM | StructuredLLM | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        *,
        output_cls: type[BaseModel] | None = None,
        blend_config: BlendConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
        empty_response: str | None = None,
    ) -> None:
        given: Any = Settings.llm if llm is None else llm
        if isinstance(given, StructuredLLM):
            output_cls, given = output_cls or given.output_cls, given.llm
        model = blend_llm(given, blend_config)
        window = model.engine.window
        if window is not None and model.max_new_tokens >= window:
            raise ConfigError(
                f"max_new_tokens={model.max_new_tokens} leaves no room for a prompt in the model's window of {window} tokens; "
                "lower it"
            )
        helper = prompt_helper or Settings._prompt_helper
        # Given so that LlamaIndex does not load a tokenizer of another model to count tokens with.
        tokenize = model.engine.tokenizer.encode
        super().__init__(
            llm=model,
            callback_manager=callback_manager,
            prompt_helper=helper or PromptHelper.from_llm_metadata(model.metadata, tokenizer=tokenize),
            chat_prompt_helper=ChatPromptHelper.from_llm_metadata(model.metadata, tokenizer=tokenize),
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        self._model = model
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._refine_template = refine_template or DEFAULT_REFINE_PROMPT_SEL
        self._refines = refine_template is not None
        self._limited_by = helper

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template, "refine_template": self._refine_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)
        self._refine_template = prompts.get("refine_template", self._refine_template)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes; other keywords are variables of the template."""
        asked = self._asked(nodes, additional_source_nodes or ())
        return self._finished(super().synthesize(query, **asked, **response_kwargs), asked)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer asynchronously; see `synthesize`."""
        asked = self._asked(nodes, additional_source_nodes or ())
        return self._finished(await super().asynthesize(query, **asked, **response_kwargs), asked)

    def _asked(self, nodes: Sequence[NodeWithScore], others: Sequence[NodeWithScore]) -> dict[str, Any]:
        """Return the arguments of LlamaIndex's `synthesize`, and beside them those of `get_response`."""
        # Copies, to be annotated: those of the index stay as they are.
        shown = [
            NodeWithScore(node=each.node.model_copy(update={"metadata": {**each.node.metadata}}), score=each.score)
            for each in nodes
        ]
        return {
            "nodes": shown,
            "additional_source_nodes": others,
            "blend_nodes": shown,
            "blend_report": AnswerReport(),
        }

    def _finished(self, response: RESPONSE_TYPE, asked: dict[str, Any]) -> RESPONSE_TYPE:
        response.metadata = {**(response.metadata or {}), REPORT_KEY: asked["blend_report"] if asked["nodes"] else None}
        return response

    @dispatcher.span
    def get_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: str | None = None, **response_kwargs: Any
    ) -> str | BaseModel | Generator[str, None, None]:
        """Answer from the texts of chunks, or refine an answer from them.

        Other keywords are variables of the template, and what `synthesize` adds: the nodes that the chunks belong to, without
        which the KV is found by the text alone. `PromptTooLongError` if there is room for none of the chunks, beside the answer
        so far where it is refined; `StructuredOutputError` if an object was asked for, and the model wrote something else.
        """
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        rounds = self._rounds(query_str, text_chunks, prev_response, **response_kwargs)
        while (prompt := self._prompt(rounds)).left_over:
            response = self._call(prompt)
            rounds.refine(prompt, response, self._read(response))
        answer: str | BaseModel | Generator[str, None, None]
        if rounds.streams:
            # The model begins at once, and errors appear here and not when the first piece is read.
            answer = self._pieces(rounds, prompt, self._call(prompt, "stream_"))
        else:
            answer = self._end(rounds, prompt, self._call(prompt))
        dispatcher.event(GetResponseEndEvent())
        return answer

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: str | None = None, **response_kwargs: Any
    ) -> str | BaseModel | AsyncGenerator[str, None]:
        """Answer asynchronously; see `get_response`."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        rounds = self._rounds(query_str, text_chunks, prev_response, **response_kwargs)
        while (prompt := await asyncio.to_thread(self._prompt, rounds)).left_over:
            response = await self._call(prompt, "a")
            rounds.refine(prompt, response, self._read(response))
        answer: str | BaseModel | AsyncGenerator[str, None]
        if rounds.streams:
            answer = self._apieces(rounds, prompt, await self._call(prompt, "astream_"))
        else:
            answer = self._end(rounds, prompt, await self._call(prompt, "a"))
        dispatcher.event(GetResponseEndEvent())
        return answer

    def _rounds(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: str | None,
        blend_nodes: Sequence[NodeWithScore] | None = None,
        blend_report: AnswerReport | None = None,
        **values: Any,
    ) -> _Rounds:
        parsers = (self._model.output_parser, self._text_qa_template.output_parser, self._refine_template.output_parser)
        # An object is there when it is whole, as in compact mode. Chat engines of LlamaIndex change `_streaming` for one call.
        streams = self._streaming and self._output_cls is None
        if streams and any(parsers):
            raise ConfigError("an output parser needs the whole answer; leave it out, or set streaming=False")
        chunks = (
            [Chunk(text.strip()) for text in text_chunks if text.strip()]
            if blend_nodes is None
            else node_chunks(each.node for each in blend_nodes)
        )
        report = AnswerReport() if blend_report is None else blend_report
        return _Rounds(query_str, chunks, values, prev_response, streams, report, blend_nodes or ())

    def _prompt(self, rounds: _Rounds) -> ContextPrompt:
        """Return the prompt of the next call, and tell LlamaIndex's listeners what its own methods would tell them."""
        values = {"query_str": rounds.query_str, **rounds.values}
        template, variable = self._text_qa_template, "context_str"
        if rounds.answer is not None:
            template, variable = self._refine_template, "context_msg"
            values["existing_answer"] = rounds.answer
        window = self._model.engine.window
        limits = [] if window is None else [window - self._model.max_new_tokens]
        if self._limited_by is not None:
            limits.append(self._limited_by.context_window - self._limited_by.num_output)
        prompt = make_context_prompt(
            self._model,
            template if self._output_cls is None else asking_for(template, self._output_cls),
            rounds.chunks,
            values,
            variable=variable,
            limit=min(limits, default=None),
            refines=self._refines,
            structured=self._output_cls is not None,
            keeps_head=self._keeps_head,
        )
        if prompt.dropped:
            rounds.dropped += [chunk.id for chunk in prompt.dropped]
            logger.warning(
                "the prompt has no room for %d of %d chunks, of which %r is the first; split documents into shorter chunks, "
                "retrieve fewer, give a refine_template, or lower max_new_tokens=%d",
                len(prompt.dropped),
                len(rounds.chunks),
                prompt.dropped[0].id,
                self._model.max_new_tokens,
            )
        shown = {**values, variable: prompt.context}
        if self._output_cls is None:
            dispatcher.event(LLMPredictStartEvent(template=template, template_args=shown))
            self._model._log_template_data(template, **shown)
        else:
            dispatcher.event(
                LLMStructuredPredictStartEvent(output_cls=self._output_cls, template=template, template_args=shown)
            )
        return prompt

    def _call(self, prompt: ContextPrompt, form: str = "") -> Any:
        """Give a prompt to the model, as messages if it is a chat model; `form` begins the name of its method."""
        options: dict[str, Any] = {"blend_prompt": prompt.blend}
        if self._output_cls is not None:
            options["output_cls"] = self._output_cls
        if prompt.messages is None:
            return getattr(self._model, f"{form}complete")(prompt.text, True, **options)
        return getattr(self._model, f"{form}chat")(prompt.messages, **options)

    def _read(self, response: ModelResponse) -> str | BaseModel:
        """Return what a call's response says: text, or the object that was asked for."""
        text = (response.message.content or "") if isinstance(response, ChatResponse) else response.text
        if self._output_cls is not None:
            answer = AnswerParser(self._output_cls).parse(text)
            dispatcher.event(LLMStructuredPredictEndEvent(output=answer))
            return answer
        output = self._model._parse_output(text)
        dispatcher.event(LLMPredictEndEvent(output=output))
        return output

    def _end(self, rounds: _Rounds, prompt: ContextPrompt, response: ModelResponse) -> str | BaseModel:
        rounds.end(prompt, response)
        # Where the model wrote nothing: what was there before, or LlamaIndex's words for it.
        return self._read(response) or rounds.answer or self._empty_response

    def _pieces(
        self, rounds: _Rounds, prompt: ContextPrompt, responses: Generator[ModelResponse, None, None]
    ) -> Generator[str, None, None]:
        is_empty = True
        with closing(responses):
            for response in responses:
                if response.raw is not None:
                    rounds.end(prompt, response)
                if response.delta:
                    is_empty = False
                    yield response.delta
        if is_empty:
            yield rounds.answer or self._empty_response

    async def _apieces(
        self, rounds: _Rounds, prompt: ContextPrompt, responses: AsyncGenerator[ModelResponse, None]
    ) -> AsyncGenerator[str, None]:
        is_empty = True
        async with aclosing(responses):
            async for response in responses:
                if response.raw is not None:
                    rounds.end(prompt, response)
                if response.delta:
                    is_empty = False
                    yield response.delta
        if is_empty:
            yield rounds.answer or self._empty_response
