"""The chain that stuffs documents into a prompt, as chunks, and the calibration of any chain."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableLambda

from cacheblend_rag import Chunk
from cacheblend_rag.chat.render import Holes
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra
from langchain_cacheblend.messages import TextPromptValue, as_chunks, as_content

if TYPE_CHECKING:
    from cacheblend_attachments.calibration import Calibration

__all__ = ["calibrate", "create_blend_documents_chain"]


def create_blend_documents_chain(
    llm: Runnable[Any, Any],
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """Make a chain that answers from documents like LangChain's ``create_stuff_documents_chain``, but passes them as chunks.

    The prompt's text is the same. But the model is told where each document is and what its id is, so nothing has to be
    searched for, documents of any length are reused, and those whose KV is not stored yet are stored under their ids.

    Parameters
    ----------
    llm : Runnable
        A `ChatBlend` or `BlendLLM`, or what ``bind`` and the like made of one.
    prompt : BasePromptTemplate
        A prompt with the variable `document_variable_name`.
    output_parser : BaseOutputParser, optional
        Reads the answer; by default its text is returned.
    document_prompt : BasePromptTemplate, optional
        Writes each document, from ``page_content`` and its metadata; by default its ``page_content`` alone.
    document_separator : str
        The text between documents.
    document_variable_name : str
        The variable, and the key of the documents in the input.

    Returns
    -------
    Runnable
        Takes a dictionary with a list of `Document` under `document_variable_name`, and the prompt's other variables.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigError(
            f"the prompt has the variables {prompt.input_variables} but not {document_variable_name!r}, where the documents "
            "should go; name the right one by document_variable_name"
        )
    writer = document_prompt or PromptTemplate.from_template("{page_content}")

    def fill(inputs: dict[str, Any]) -> PromptValue:
        holes = Holes[Chunk]()
        written = (_written(document, writer, holes) for document in inputs[document_variable_name])
        value = prompt.invoke({**inputs, document_variable_name: document_separator.join(written)})
        if isinstance(value, ChatPromptValue):
            made: PromptValue = ChatPromptValue(messages=_with_blocks(value.messages, holes))
        else:
            made = TextPromptValue.of(holes.split(value.to_string()))
        holes.check()
        return made

    chain = RunnableLambda(fill).with_config(run_name="format_inputs") | llm | (output_parser or StrOutputParser())
    return chain.with_config(run_name="blend_documents_chain")


def calibrate(chain: Runnable[Any, Any], questions: Sequence[Any], **options: Any) -> Calibration:
    """Find the smallest recompute ratio that keeps full prefill's quality, on the prompts that a chain makes.

    The chain is invoked once with each question, and `cacheblend_attachments.calibrate` is given the prompts and the settings of
    the chain's model. Nothing is changed: give what was found to the model,
    ``blend_config=BlendConfig(recompute_ratio=found.recompute_ratio)``.

    Parameters
    ----------
    chain : Runnable
        A chain with a `ChatBlend` or `BlendLLM`, which nothing else should use meanwhile.
    questions : sequence
        What the chain is invoked with, ten at least.
    **options : Any
        As for `cacheblend_attachments.calibrate`: ``answers``, ``selector``, ``ratios``, ``target`` and so on.

    Returns
    -------
    Calibration
        What was measured (``rows``), what was chosen (``recompute_ratio``, or None), and why (``reason``).
    """
    if not isinstance(chain, Runnable):
        raise ConfigError(f"chain is a {type(chain).__name__}; give a chain, as prompt | llm")

    with needs_extra("attachments", "calibrate"):
        from cacheblend_attachments.calibration import calibrate_asking
    return calibrate_asking(chain.invoke, questions, **options)


def _written(document: Document, writer: BasePromptTemplate[Any], holes: Holes[Chunk]) -> str:
    """Return a document as it stands in the prompt, with a mark for its text where that stands there verbatim, once."""
    if document.page_content:
        probe = uuid.uuid4().hex
        text = format_document(document.model_copy(update={"page_content": probe}), writer)
        if text.count(probe) == 1:
            return text.replace(probe, holes.text(as_chunks([document])))
    return format_document(document, writer)


def _with_blocks(messages: Sequence[BaseMessage], holes: Holes[Chunk]) -> list[BaseMessage]:
    """Return the messages with a block for each document whose mark stands in them."""
    filled: list[BaseMessage] = []
    for message in messages:
        content: list[Any] = []
        for block in [message.content] if isinstance(message.content, str) else message.content:
            text = block if isinstance(block, str) else block.get("text") if block.get("type") == "text" else None
            content += [block] if text is None else as_content(holes.split(text))
        plain = all(isinstance(block, str) for block in content)
        filled.append(message if plain else message.model_copy(update={"content": content}))
    return filled
