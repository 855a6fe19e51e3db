"""Prompt templates written in the prompt markup language."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate
from langchain_core.prompts.string import PromptTemplateFormat, get_template_variables
from langchain_core.utils.formatting import formatter
from pydantic import ConfigDict

from cacheblend_pml import PMLText, Prompt, Schema
from cacheblend_rag.chunk import PROMPT_KEY
from cacheblend_rag.errors import ConfigError

__all__ = ["PMLPromptTemplate", "PMLPromptValue"]

_FORMAT: PromptTemplateFormat = "f-string"


class PMLPromptValue(PromptValue):
    """A prompt of a schema on its way to a model."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt: Prompt

    def to_string(self) -> str:
        """Return the prompt as plain text, which `BlendLLM` takes for the prompt that it is."""
        return PMLText.of(self.prompt)

    def to_messages(self) -> list[BaseMessage]:
        """Return one message with the prompt as plain text, which `ChatBlend` takes for the prompt that it is."""
        return [HumanMessage(content=self.prompt.plain_text(), additional_kwargs={PROMPT_KEY: self.prompt})]


class PMLPromptTemplate(BasePromptTemplate[PMLPromptValue]):
    """A prompt of a schema with variables in its arguments and new text, for `BlendLLM` and `ChatBlend`.

    ::

        schema = Schema.from_file("travel.pml")
        Schemas(llm.engine).load(schema)
        template = PMLPromptTemplate.from_markup(
            schema, '<prompt schema="travel"><travel-plan duration="{duration}"><rome/></travel-plan>{question}</prompt>'
        )
        chain = template | llm

    Variables are written as in every f-string template of LangChain, and their values are text, never markup. Retrieved
    documents can take the place of a module, each of them as a module: those that a `BlendVectorStore` has encoded are not
    encoded again.

    Parameters
    ----------
    prompt : Prompt
        The prompt with its variables, from ``schema.prompt(...)`` or ``schema.parse_prompt(...)``.
    documents : str, optional
        The name of a module that the prompt imports and that documents take the place of. It is a variable too: a list of
        documents, or of strings.
    separator : str
        Text after each document.

    Raises
    ------
    PMLError
        If `documents` names no module that the prompt imports, or a member of a union.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt: Prompt
    documents: str | None = None
    separator: str = "\n\n"

    def __init__(self, prompt: Prompt, documents: str | None = None, separator: str = "\n\n", **fields: Any) -> None:
        if documents is not None:
            prompt.check_documents(documents)
        names = {name for text in prompt.texts() for name in get_template_variables(text, _FORMAT)}
        if documents is not None:
            names.add(documents)
        names -= fields.get("partial_variables", {}).keys()
        fields.setdefault("input_variables", sorted(names))
        super().__init__(prompt=prompt, documents=documents, separator=separator, **fields)  # type: ignore[call-arg]

    @classmethod
    def from_markup(
        cls, schema: Schema, markup: str, *, documents: str | None = None, separator: str = "\n\n"
    ) -> PMLPromptTemplate:
        """Read the prompt from markup, ``<prompt schema="...">`` with its variables; `PMLError` if it does not fit the schema."""
        return cls(schema.parse_prompt(markup), documents, separator)

    def pml_prompt(self, **values: Any) -> Prompt:
        """Return the prompt with its variables filled in; `ConfigError` if the documents are neither documents nor strings."""
        given = self._merge_partial_and_user_variables(**values)
        prompt = self.prompt.map_texts(
            lambda text: formatter.format(text, **given) if "{" in text or "}" in text else text
        )
        if self.documents is None:
            return prompt
        return prompt.put_documents(self.documents, _texts(given[self.documents]), self.separator)

    def format_prompt(self, **kwargs: Any) -> PMLPromptValue:
        """Return the prompt for a model."""
        return PMLPromptValue(prompt=self.pml_prompt(**kwargs))

    def format(self, **kwargs: Any) -> str:  # type: ignore[override]  # as LangChain's own templates do
        """Return the prompt as plain text."""
        return self.format_prompt(**kwargs).to_string()

    @property
    def _prompt_type(self) -> str:
        return "pml"


def _texts(documents: Any) -> list[str]:
    if isinstance(documents, str | Document):
        raise ConfigError("documents is a single document; give a list of them")
    texts = [document.page_content if isinstance(document, Document) else document for document in documents]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"documents holds a {type(text).__name__}; give documents or strings")
    return [text for text in texts if text]
