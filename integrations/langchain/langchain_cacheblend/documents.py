"""Documents as they are given to a model: exactly, as chunks that need not be looked for in the prompt."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.messages.content import PlainTextContentBlock

from cacheblend_rag import Chunk
from cacheblend_rag.errors import ConfigError

__all__ = ["INLINE", "as_chunks", "chunk_block", "documents_to_blocks"]

INLINE = "cacheblend_inline"
"""Key in a block's ``extras``: nothing is put between the document and the text beside it."""


def as_chunks(documents: Iterable[Document]) -> list[Chunk]:
    """Make chunks of documents, leaving out those without text.

    Raises
    ------
    ConfigError
        If one of them is no `Document`, or they are one themselves.
    """
    if isinstance(documents, Document):
        raise ConfigError(
            f"the documents are a single Document, {documents.page_content!r:.40}; give a list: [document]"
        )
    documents = list(documents)
    for document in documents:
        if not isinstance(document, Document):
            raise ConfigError(
                f"a {type(document).__name__} stands among the documents; give Document(page_content, id=...) objects"
            )
    return [Chunk(document.page_content, document.id or None) for document in documents if document.page_content]


def documents_to_blocks(documents: Iterable[Document]) -> list[PlainTextContentBlock]:
    """Make content blocks of documents, which a model then takes as chunks exactly, without looking for them in the prompt.

    Parameters
    ----------
    documents : iterable of Document
        The documents, from a retriever for example.

    Returns
    -------
    list of PlainTextContentBlock
        One block of type "text-plain" for each document that has text, for the content of a message.
    """
    return [chunk_block(chunk) for chunk in as_chunks(documents)]


def chunk_block(chunk: Chunk, *, inline: bool = False) -> PlainTextContentBlock:
    """Make a content block of a chunk; `inline` says that nothing is put between it and the text beside it."""
    block = PlainTextContentBlock(type="text-plain", mime_type="text/plain", text=chunk.text)
    if chunk.id:
        block["id"] = chunk.id
    if inline:
        block["extras"] = {INLINE: True}
    return block
