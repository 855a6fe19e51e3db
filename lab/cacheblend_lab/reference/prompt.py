"""The prompt in one place: chat template, prompt formats, and how a prompt falls into pieces.

Training, evaluation, the demonstration and the framework integrations all write prompts through this module, so that what the
model reads in use is what it has learnt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = [
    "ASSISTANT",
    "BOS",
    "CHAT_TEMPLATE",
    "DEFAULT_FORMAT",
    "EOS",
    "FORMATS",
    "PAD",
    "SPECIAL_TOKENS",
    "SYSTEM",
    "USER",
    "PromptFormat",
    "chat",
    "value_of",
]

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class PromptFormat:
    """A format in which chunks and a question become one prompt.

    Attributes
    ----------
    head
        Text before the first chunk (without BOS).
    separator
        Text between chunks.
    middle
        Text between the last chunk and the question.
    tail
        Text between the question and the answer.
    """

    head: str
    separator: str
    middle: str
    tail: str

    def prefix(self) -> str:
        """Return the text before the first chunk, BOS included."""
        return BOS + self.head

    def suffix(self, question: str) -> str:
        """Return the text after the last chunk."""
        return self.middle + question + self.tail

    def render(self, chunks: Sequence[str], question: str) -> str:
        """Return the whole prompt, BOS included."""
        return self.prefix() + self.separator.join(chunks) + self.suffix(question)


def chat(inner: PromptFormat, system: str | None = None) -> PromptFormat:
    """Return a format's text as the user's message of a chat; the same as the chat template renders."""
    opening = f"{SYSTEM}\n{system}\n" if system else ""
    return PromptFormat(f"{opening}{USER}\n{inner.head}", inner.separator, inner.middle, f"{inner.tail}\n{ASSISTANT}\n")


# The default templates of LlamaIndex (text_qa_template and its system prompt for chat models) and LangChain's usual one.
_LLAMA_INDEX = PromptFormat(
    "Context information is below.\n---------------------\n",
    "\n\n",
    "\n---------------------\nGiven the context information and not prior knowledge, answer the query.\nQuery: ",
    "\nAnswer: ",
)
_LLAMA_INDEX_SYSTEM = (
    "You are an expert Q&A system that is trusted around the world.\n"
    "Always answer the query using the provided context information, and not prior knowledge.\n"
    "Some rules to follow:\n"
    "1. Never directly reference the given context in your answer.\n"
    "2. Avoid statements like 'Based on the context, ...' or "
    "'The context information ...' or anything along those lines."
)
_LANGCHAIN = PromptFormat("Answer the question from the context only.\n\n", "\n\n", "\n\nQuestion: ", "")
_LANGCHAIN_ANSWER = PromptFormat(
    "Answer the question from the context only.\n\n", "\n\n", "\n\nQuestion: ", "\nAnswer: "
)

DEFAULT_FORMAT = "chat"
FORMATS: dict[str, PromptFormat] = {
    "chat": chat(replace(_LANGCHAIN, separator="\n")),
    "chat_blank_line": chat(_LANGCHAIN),
    "plain": _LANGCHAIN,
    "plain_answer": replace(_LANGCHAIN_ANSWER, separator="\n"),
    "llama_index": _LLAMA_INDEX,
    "llama_index_chat": chat(_LLAMA_INDEX),
    "llama_index_system": chat(_LLAMA_INDEX, _LLAMA_INDEX_SYSTEM),
}
"""Every format the model is trained on. ``chat`` (chunks one a line) is the project's own."""

_VALUE = re.compile(
    r".*\b(?:born in|lives in|works for|is a|keeps a|is based in|makes|founded by|called|is) (?P<value>.+?)\.?\s*",
    re.DOTALL,
)
_UNSAID = re.compile(r"(?:^|: )(The context does not say)\.?$")
_VERDICT = re.compile(r", so (?:yes|no)\.?$")


def value_of(sentence: str) -> str:
    """Return the value at the end of a sentence that the model answers with; of a comparison, all of it.

    A verdict alone would be right half of the time, with both values wrong.
    """
    sentence = sentence.strip()
    unsaid = _UNSAID.search(sentence)
    if unsaid:
        return unsaid[1]
    found = None if _VERDICT.search(sentence) else _VALUE.fullmatch(sentence)
    return found["value"] if found else sentence.rstrip(".")
