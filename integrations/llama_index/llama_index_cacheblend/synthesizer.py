"""The response synthesizer behind ``response_mode="blend"``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import LLMPredictEndEvent, LLMPredictStartEvent
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.settings import Settings

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.context import ContextPrompt, make_context_prompt
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.nodes import node_chunks
from llama_index_cacheblend.sources import annotate

__all__ = ["BlendSynthesizer"]

dispatcher = get_dispatcher(__name__)


class BlendSynthesizer(BaseSynthesizer):
    """Answers from retrieved nodes whose KV is stored.

    The model is given the prompt that LlamaIndex's compact mode gives it, in one call. ``response.metadata["blend"]`` holds the
    `BlendReport` as a dictionary, with ``dropped``, the ids of the nodes for which the model's window had no room, beside it. Of
    a stream it is filled when the stream ends, and it is None where nothing was retrieved. With ``source_attention`` in the
    settings, source nodes are copies whose metadata have ``blend_attention``, the share of the answer's attention that went to
    the node, and ``blend_status``, why it was not blended if it was not.

    Parameters
    ----------
    llm : BlendLLM, optional
        The model; by default ``Settings.llm``.
    text_qa_template : BasePromptTemplate, optional
        The template, with ``context_str`` and ``query_str``.
    config : BlendConfig, optional
        Blending settings of this synthesizer, instead of the engine's.
    streaming : bool
        Whether answers are streams.
    callback_manager : CallbackManager, optional
        Callbacks.
    empty_response : str, optional
        The answer where nothing was retrieved.

    Raises
    ------
    ConfigError
        If the language model cannot blend.
    """

    def __init__(
        self,
        llm: BlendLLM | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        config: BlendConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
    ) -> None:
        model = Settings.llm if llm is None else llm
        if not isinstance(model, BlendLLM):
            raise ConfigError(
                f"blending needs a BlendLLM, and the language model is a {type(model).__name__}; pass "
                'llm=BlendLLM(model="reference"), or set Settings.llm to one'
            )
        # Given so that LlamaIndex does not load a tokenizer of another model to count tokens with.
        tokenize = model.engine.tokenizer.encode
        super().__init__(
            llm=model,
            callback_manager=callback_manager,
            prompt_helper=PromptHelper.from_llm_metadata(model.metadata, tokenizer=tokenize),
            chat_prompt_helper=ChatPromptHelper.from_llm_metadata(model.metadata, tokenizer=tokenize),
            streaming=streaming,
            empty_response=empty_response,
        )
        self._model = model
        self._config = config
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes; other keywords are variables of the template."""
        report: dict[str, Any] = {}
        response = super().synthesize(
            query, nodes, additional_source_nodes, blend_nodes=nodes, blend_report=report, **response_kwargs
        )
        return self._with_report(response, report if nodes else None)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Do what `synthesize` does."""
        report: dict[str, Any] = {}
        response = await super().asynthesize(
            query, nodes, additional_source_nodes, blend_nodes=nodes, blend_report=report, **response_kwargs
        )
        return self._with_report(response, report if nodes else None)

    @dispatcher.span
    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        blend_nodes: Sequence[NodeWithScore] | None = None,
        blend_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> str | Generator[str, None, None]:
        """Answer from chunks.

        Parameters
        ----------
        query_str : str
            The question.
        text_chunks : sequence of str
            The texts of the chunks.
        blend_nodes : sequence of NodeWithScore, optional
            The nodes they belong to; without them the KV is found by the text alone.
        blend_report : dict, optional
            Filled with the report.
        **response_kwargs : Any
            Further variables of the template.

        Returns
        -------
        str or generator of str
            The answer.
        """
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        prompt = self._prompt(query_str, text_chunks, blend_nodes, response_kwargs)
        report = {} if blend_report is None else blend_report
        answer: str | Generator[str, None, None]
        if self._streaming:
            answer = self._tokens(prompt, report)
        elif prompt.messages is not None:
            answer = self._answer(self._model.chat(prompt.messages, **self._options(prompt)), prompt, report)
        else:
            answer = self._answer(self._model.complete(prompt.text, True, **self._options(prompt)), prompt, report)
        dispatcher.event(GetResponseEndEvent())
        return answer

    @dispatcher.span
    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        blend_nodes: Sequence[NodeWithScore] | None = None,
        blend_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> str | AsyncGenerator[str, None]:
        """Do what `get_response` does."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        prompt = await asyncio.to_thread(self._prompt, query_str, text_chunks, blend_nodes, response_kwargs)
        report = {} if blend_report is None else blend_report
        answer: str | AsyncGenerator[str, None]
        if self._streaming:
            answer = await self._atokens(prompt, report)
        elif prompt.messages is not None:
            answer = self._answer(await self._model.achat(prompt.messages, **self._options(prompt)), prompt, report)
        else:
            answer = self._answer(
                await self._model.acomplete(prompt.text, True, **self._options(prompt)), prompt, report
            )
        dispatcher.event(GetResponseEndEvent())
        return answer

    def _prompt(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        nodes: Sequence[NodeWithScore] | None,
        values: dict[str, Any],
    ) -> ContextPrompt:
        if nodes is None:
            chunks = [Chunk(text=text.strip()) for text in text_chunks if text.strip()]
        else:
            chunks = node_chunks(each.node for each in nodes)
        if self._streaming and (self._text_qa_template.output_parser or self._model.output_parser):
            raise ConfigError("an output parser needs the whole answer; leave it out, or set streaming=False")
        prompt = make_context_prompt(self._model, self._text_qa_template, chunks, query_str=query_str, **values)
        # What LlamaIndex's own `predict` tells its listeners.
        shown = {"context_str": prompt.context, "query_str": query_str, **values}
        dispatcher.event(LLMPredictStartEvent(template=self._text_qa_template, template_args=shown))
        self._model._log_template_data(self._text_qa_template, **shown)
        return prompt

    def _with_report(self, response: RESPONSE_TYPE, report: dict[str, Any] | None) -> RESPONSE_TYPE:
        response.metadata = {**(response.metadata or {}), "blend": report}
        asked = (self._config or self._model.engine.config).source_attention
        return annotate(response, report) if asked and report is not None else response

    def _options(self, prompt: ContextPrompt) -> dict[str, Any]:
        options: dict[str, Any] = {"blend_prompt": prompt.blend}
        return options if self._config is None else options | {"blend_config": self._config}

    def _answer(
        self, response: ChatResponse | CompletionResponse, prompt: ContextPrompt, report: dict[str, Any]
    ) -> str:
        report.update(_report_of(response, prompt))
        text = (response.message.content or "") if isinstance(response, ChatResponse) else response.text
        output = self._model._parse_output(text)
        dispatcher.event(LLMPredictEndEvent(output=output))
        return output

    def _tokens(self, prompt: ContextPrompt, report: dict[str, Any]) -> Generator[str, None, None]:
        # Called here and not in the generator, so that the model begins, and errors appear, before anyone reads.
        responses = (
            self._model.stream_complete(prompt.text, True, **self._options(prompt))
            if prompt.messages is None
            else self._model.stream_chat(prompt.messages, **self._options(prompt))
        )

        def read() -> Generator[str, None, None]:
            for response in responses:
                if response.raw is not None:
                    report.update(_report_of(response, prompt))
                if response.delta:
                    yield response.delta

        return read()

    async def _atokens(self, prompt: ContextPrompt, report: dict[str, Any]) -> AsyncGenerator[str, None]:
        responses = (
            await self._model.astream_complete(prompt.text, True, **self._options(prompt))
            if prompt.messages is None
            else await self._model.astream_chat(prompt.messages, **self._options(prompt))
        )

        async def read() -> AsyncGenerator[str, None]:
            async for response in responses:
                if response.raw is not None:
                    report.update(_report_of(response, prompt))
                if response.delta:
                    yield response.delta

        return read()


def _report_of(response: ChatResponse | CompletionResponse, prompt: ContextPrompt) -> dict[str, Any]:
    assert response.raw is not None
    report: dict[str, Any] = response.raw["blend"] | {"dropped": [chunk.id for chunk in prompt.dropped]}
    return report if prompt.fallback_reason is None else report | {"fallback_reason": prompt.fallback_reason}
