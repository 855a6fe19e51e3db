"""Prompt templates written in the prompt markup language."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import ConfigDict
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.prompts.utils import format_string, get_template_vars
from llama_index.core.schema import BaseNode, NodeWithScore

from cacheblend_pml import PMLText, Prompt
from cacheblend_rag.chunk import PROMPT_KEY
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.nodes import llm_text

__all__ = ["CONTEXT", "PMLPromptTemplate"]

CONTEXT = "context_str"
"""LlamaIndex's name of the variable for what was retrieved."""


class PMLPromptTemplate(BasePromptTemplate):
    """A prompt of a schema with variables in its arguments and new text, for `BlendLLM` and `BlendSynthesizer`.

    ::

        schema = Schema.from_file("notes.pml")
        Schemas(llm.engine).load(schema)
        prompt = schema.parse_prompt('<prompt schema="notes"><rules/><notes/>{query_str}</prompt>')
        template = PMLPromptTemplate(prompt, documents="notes")
        index.as_query_engine(llm=llm, response_mode="blend", text_qa_template=template)

    Variables are written as in every LlamaIndex template, and their values are text, never markup. With `documents`, what was
    retrieved fills the place of a module, each node as a module: those that a `BlendVectorStore` has encoded are not encoded
    again.

    Parameters
    ----------
    prompt : Prompt
        The prompt with its variables, from ``schema.prompt(...)`` or ``schema.parse_prompt(...)``.
    documents : str, optional
        The name of a module that the prompt imports. ``context_str`` takes its place: a list of nodes or strings, or one string.
    separator : str
        Text after each document.
    prompt_type, metadata, **kwargs
        As for every template of LlamaIndex; the latter are values of variables.

    Raises
    ------
    PMLError
        If `documents` names no module that the prompt imports, or a member of a union.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt: Prompt
    documents: str | None
    separator: str

    def __init__(
        self,
        prompt: Prompt,
        documents: str | None = None,
        separator: str = "\n\n",
        prompt_type: str = PromptType.CUSTOM,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if documents is not None:
            prompt.check_documents(documents)
        names = dict.fromkeys(name for text in prompt.texts() for name in get_template_vars(text))
        if documents is not None:
            names[CONTEXT] = None
        values: dict[str, Any] = {
            "prompt": prompt,
            "documents": documents,
            "separator": separator,
            "metadata": {"prompt_type": prompt_type} | (metadata or {}),
            "template_vars": list(names),
            "kwargs": kwargs,
            "output_parser": None,
        }
        super().__init__(**values)

    def pml_prompt(self, **values: Any) -> Prompt:
        """Return the prompt with its variables filled in; `ConfigError` if one is missing, or the context is no text."""
        given = self._map_all_vars(self.kwargs | values)
        missing = [name for name in self.template_vars if name not in given]
        if missing:
            raise ConfigError(f"the prompt has the variables {', '.join(missing)}, for which there is no value")
        prompt = self.prompt.map_texts(lambda text: format_string(text, **given))
        if self.documents is None:
            return prompt
        return prompt.put_documents(self.documents, _texts(given[CONTEXT]), self.separator)

    def partial_format(self, **kwargs: Any) -> PMLPromptTemplate:
        """Return the template with some of its variables filled in."""
        return self.model_copy(update={"kwargs": self.kwargs | kwargs, "metadata": dict(self.metadata)})

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """Return the prompt as plain text, which `BlendLLM` takes for the prompt that it is."""
        del llm
        for name in ("messages_to_prompt", "completion_to_prompt"):
            kwargs.pop(name, None)
        return PMLText.of(self.pml_prompt(**kwargs))

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Return one message with the prompt as plain text, which `BlendLLM` takes for the prompt that it is."""
        del llm
        prompt = self.pml_prompt(**kwargs)
        return [ChatMessage(role=MessageRole.USER, content=prompt.plain_text(), additional_kwargs={PROMPT_KEY: prompt})]

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """Return the prompt as plain text, with its variables."""
        del llm
        return self.prompt.plain_text()


def _texts(context: Any) -> list[str]:
    given = [context] if isinstance(context, str | BaseNode | NodeWithScore) else list(context)
    texts = []
    for each in given:
        if isinstance(each, NodeWithScore):
            each = each.node
        if not isinstance(each, str | BaseNode):
            raise ConfigError(f"{CONTEXT} holds a {type(each).__name__}; give nodes or strings")
        texts.append(each if isinstance(each, str) else llm_text(each))
    return [text for text in texts if text]
