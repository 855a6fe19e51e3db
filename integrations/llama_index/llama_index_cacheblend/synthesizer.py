"""The response synthesizer behind ``response_mode="blend"``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from typing import Any, Literal

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
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
from llama_index_cacheblend.calls import Caller, ModelResponse, aor_instead, or_instead
from llama_index_cacheblend.context import ContextPrompt
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.nodes import node_chunks
from llama_index_cacheblend.prompting import Prompting
from llama_index_cacheblend.rounds import Rounds
from llama_index_cacheblend.sources import annotate

__all__ = ["BlendSynthesizer"]

dispatcher = get_dispatcher(__name__)


class BlendSynthesizer(BaseSynthesizer):
    """Answers from retrieved nodes whose KV is stored.

    The model is given the prompt that LlamaIndex's compact mode gives it. ``response.metadata["blend"]`` holds the `BlendReport`
    as a dictionary, and beside it ``dropped``, the ids of the nodes for which there was no room, and ``earlier_calls``, the
    reports of the calls before the last where the answer was refined. Of a stream it is filled when the stream ends, and it is
    None where nothing was retrieved. With ``source_attention`` in the settings, source nodes are copies whose metadata have
    ``blend_attention``, the share of the answer's attention that went to the node, and ``blend_status``, why it was not blended
    if it was not.

    Parameters
    ----------
    llm : BlendLLM or StructuredLLM, optional
        The model, or what its ``as_structured_llm`` returned; by default ``Settings.llm``.
    text_qa_template : BasePromptTemplate, optional
        The template, with ``context_str`` and ``query_str``.
    refine_template : BasePromptTemplate, optional
        The template of the calls after the first, with ``context_msg``, ``query_str`` and ``existing_answer``.
    overflow : {"drop", "refine"}, optional
        What becomes of nodes for which the model's window has no room. They are whole in either case, and in retrieval order.
        "drop" answers by one call without them; "refine" gives them to further calls, with the answer so far. A node that is
        too long for a call of its own is dropped in either case. By default "refine" if a `refine_template` is given, or else
        "drop".
    output_cls : type, optional
        A pydantic model. The answer is one of these, which the model writes as JSON; never a stream.
    config : BlendConfig, optional
        Blending settings of this synthesizer, instead of the engine's.
    streaming : bool
        Whether answers are streams.
    callback_manager : CallbackManager, optional
        Callbacks.
    prompt_helper : PromptHelper, optional
        Its ``context_window`` less its ``num_output`` limits the prompt, where that is less than the model's window has room
        for; by default ``Settings.prompt_helper``, if it was set.
    empty_response : str, optional
        The answer where nothing was retrieved.

    Raises
    ------
    ConfigError
        If the language model cannot blend, its ``max_new_tokens`` leave no room for a prompt, its engine cannot be given
        `config`, or `overflow` is none of the two.
    """

    # Whether templates hold nothing that somebody said.
    _keeps_head = True

    def __init__(
        self,
        llm: BlendLLM | StructuredLLM | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        *,
        overflow: Literal["drop", "refine"] | None = None,
        output_cls: type[BaseModel] | None = None,
        config: BlendConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
        empty_response: str | None = None,
    ) -> None:
        model = Settings.llm if llm is None else llm
        if isinstance(model, StructuredLLM):
            output_cls, model = output_cls or model.output_cls, model.llm
        if not isinstance(model, BlendLLM):
            raise ConfigError(
                f"blending needs a BlendLLM, and the language model is a {type(model).__name__}; pass "
                'llm=BlendLLM(model="reference"), or set Settings.llm to one'
            )
        if overflow not in (None, "drop", "refine"):
            raise ConfigError(f'overflow={overflow!r} is none of "drop" and "refine"')
        if config is not None:
            model.engine.check_config(config)
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
        self._caller = Caller(model, config)
        self._tells_sources = (config or model.engine.config).source_attention
        self._prompting = Prompting(
            model,
            text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL,
            refine_template or DEFAULT_REFINE_PROMPT_SEL,
            output_cls=output_cls,
            refines=(overflow or ("drop" if refine_template is None else "refine")) == "refine",
            limited_by=helper,
            keeps_head=self._keeps_head,
        )

    def _get_prompts(self) -> PromptDictType:
        prompting = self._prompting
        return {"text_qa_template": prompting.text_qa_template, "refine_template": prompting.refine_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        prompting = self._prompting
        prompting.text_qa_template = prompts.get("text_qa_template", prompting.text_qa_template)
        prompting.refine_template = prompts.get("refine_template", prompting.refine_template)

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
        prev_response: str | None = None,
        blend_nodes: Sequence[NodeWithScore] | None = None,
        blend_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> str | BaseModel | Generator[str, None, None]:
        """Answer from chunks.

        Parameters
        ----------
        query_str : str
            The question.
        text_chunks : sequence of str
            The texts of the chunks.
        prev_response : str, optional
            An answer to refine from these chunks.
        blend_nodes : sequence of NodeWithScore, optional
            The nodes they belong to; without them the KV is found by the text alone.
        blend_report : dict, optional
            Filled with the report.
        **response_kwargs : Any
            Further variables of the template.

        Returns
        -------
        str, BaseModel or generator of str
            The answer.

        Raises
        ------
        StructuredOutputError
            If an object was asked for, and the model wrote something else.
        PromptTooLongError
            If there is room for none of the chunks, or not even for the question.
        """
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        rounds = self._rounds(query_str, text_chunks, prev_response, blend_nodes, blend_report, response_kwargs)
        while (prompt := self._prompting.prompt(rounds)) is not None and prompt.left_over:
            response = self._caller.call(prompt)
            rounds.refine(prompt, response, self._prompting.answer(response))
        answer: str | BaseModel | Generator[str, None, None]
        if prompt is None:
            answer = self._given_up(rounds)
            answer = _in_one_piece(answer) if self._streams else answer
        elif self._streams:
            answer = or_instead(self._caller.stream(prompt, partial(rounds.end, prompt)), self._instead(rounds))
        else:
            answer = self._end(rounds, prompt, self._caller.call(prompt))
        dispatcher.event(GetResponseEndEvent())
        return answer

    @dispatcher.span
    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: str | None = None,
        blend_nodes: Sequence[NodeWithScore] | None = None,
        blend_report: dict[str, Any] | None = None,
        **response_kwargs: Any,
    ) -> str | BaseModel | AsyncGenerator[str, None]:
        """Do what `get_response` does."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        rounds = self._rounds(query_str, text_chunks, prev_response, blend_nodes, blend_report, response_kwargs)
        while (prompt := await asyncio.to_thread(self._prompting.prompt, rounds)) is not None and prompt.left_over:
            response = await self._caller.acall(prompt)
            rounds.refine(prompt, response, self._prompting.answer(response))
        answer: str | BaseModel | AsyncGenerator[str, None]
        if prompt is None:
            answer = self._given_up(rounds)
            answer = _ain_one_piece(answer) if self._streams else answer
        elif self._streams:
            pieces = await self._caller.astream(prompt, partial(rounds.end, prompt))
            answer = aor_instead(pieces, self._instead(rounds))
        else:
            answer = self._end(rounds, prompt, await self._caller.acall(prompt))
        dispatcher.event(GetResponseEndEvent())
        return answer

    @property
    def _streams(self) -> bool:
        # An object is there when it is whole, as in compact mode.
        return self._streaming and self._output_cls is None

    def _rounds(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: str | None,
        nodes: Sequence[NodeWithScore] | None,
        report: dict[str, Any] | None,
        values: dict[str, Any],
    ) -> Rounds:
        if self._streams and self._prompting.parses:
            raise ConfigError("an output parser needs the whole answer; leave it out, or set streaming=False")
        chunks = (
            [Chunk(text=text.strip()) for text in text_chunks if text.strip()]
            if nodes is None
            else node_chunks(each.node for each in nodes)
        )
        return Rounds(query_str, chunks, values, prev_response, {} if report is None else report)

    def _with_report(self, response: RESPONSE_TYPE, report: dict[str, Any] | None) -> RESPONSE_TYPE:
        response.metadata = {**(response.metadata or {}), "blend": report}
        return annotate(response, report) if self._tells_sources and report is not None else response

    def _end(self, rounds: Rounds, prompt: ContextPrompt, response: ModelResponse) -> str | BaseModel:
        rounds.end(prompt, response)
        return self._prompting.answer(response) or self._instead(rounds)

    def _instead(self, rounds: Rounds) -> str:
        """Return the answer where the model wrote nothing: what was there before, or LlamaIndex's words for it."""
        return rounds.answer or self._empty_response

    def _given_up(self, rounds: Rounds) -> Any:
        rounds.give_up()
        return rounds.last or rounds.answer or self._empty_response


def _in_one_piece(answer: str) -> Generator[str, None, None]:
    yield answer


async def _ain_one_piece(answer: str) -> AsyncGenerator[str, None]:
    yield answer
