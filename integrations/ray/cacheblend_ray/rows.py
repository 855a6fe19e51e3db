"""Documents as rows of a dataset: folders, what frameworks' loaders return, and rows of any source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, read_texts, split_text
from cacheblend_rag.errors import ConfigError, PromptError

__all__ = ["Columns", "chunks_of", "joined", "rows_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Columns:
    """Names of a dataset's columns.

    Attributes
    ----------
    document : str
        The name of the document.
    text : str
        All of its text, which is then cut.
    chunks : str
        Its chunks, a list of strings in the order of reading; where there is this column, the text is not looked at.
    """

    document: str = "document"
    text: str = "text"
    chunks: str = "chunks"


def rows_of(source: Any) -> list[dict[str, Any]]:
    """Return the documents of files, folders, rows, or LlamaIndex's or LangChain's documents, a row each.

    Parameters
    ----------
    source : Any
        A path, or a list of paths, mappings with the fields of `Columns`, or documents. A file's document is called by its path
        below the folder that was given; LangChain's, by its ``source`` or its id; LlamaIndex's, by its id. Several of LangChain's
        with one source, as pages have it, are one document.

    Raises
    ------
    ConfigError
        If something is none of these, or two files would be called the same.
    """
    items = [source] if isinstance(source, str | Path) else list(source)
    rows: dict[str, dict[str, Any]] = {}
    for item in items:
        if isinstance(item, str | Path):
            for name, text in _files(Path(item)):
                if name in rows and rows[name]["text"] != text:
                    raise ConfigError(f"two files would be the document {name!r}; warm the folder above both")
                rows[name] = {"document": name, "text": text}
            continue
        row = _row(item)
        name = row["document"]
        if name not in rows:
            rows[name] = row
        elif "page" in row:
            rows[name]["text"] += "\n\n" + row["text"]
        else:
            raise ConfigError(f"the document {name!r:.80} is there twice; give each once, with all of its text")
    # All rows have the same columns, none of them empty, of which Ray would make one of numbers.
    names = [name for name in ("document", "text", "chunks") if any(row.get(name) is not None for row in rows.values())]
    return [{name: row.get(name) for name in names} for row in rows.values()]


def chunks_of(row: Mapping[str, Any], columns: Columns, count: Callable[[str], int], chunk_tokens: int) -> list[Chunk]:
    """Return the chunks of the document in a row, with the ids that the server gives them.

    Raises
    ------
    PromptError
        If it has no name, or no text.
    """
    name = row.get(columns.document)
    if not isinstance(name, str) or not name:
        raise PromptError(
            f"the row has no document: its {columns.document!r} is {name!r:.40}; name the column that has it"
        )
    given = row.get(columns.chunks)
    if given is None or isinstance(given, float):  # not a number is what pandas has for nothing
        text = row.get(columns.text)
        if not isinstance(text, str):
            raise PromptError(
                f"the document {name!r:.80} has neither {columns.chunks!r} nor {columns.text!r}; name the columns that have them"
            )
        pieces = split_text(text, count, chunk_tokens)
    else:
        pieces = [str(piece) for piece in given]
    if not pieces or not all(piece.strip() for piece in pieces):
        raise PromptError(f"the document {name!r:.80} is blank, or a chunk of it is; leave that out")
    return [passage.chunk for passage in named_passages(name, pieces)]


def joined(group: Mapping[str, Sequence[Any]], columns: Columns, order: str) -> dict[str, list[Any]]:
    """Return the one row of a document whose rows are pieces of it, in their order."""
    pieces = sorted(zip(group[order], group[columns.text], strict=True), key=lambda piece: piece[0])
    return {columns.document: [group[columns.document][0]], columns.chunks: [[str(text) for _, text in pieces]]}


def _files(path: Path) -> Iterator[tuple[str, str]]:
    def refuse(file: Path, reason: str) -> None:
        if file == path:
            raise ConfigError(f"{file} cannot be read: {reason}")
        logger.warning("%s is left out: %s", file, reason)

    for file, text in read_texts(path, refuse):
        # As many folders have them; there is nothing to compute.
        if text.strip():
            yield (file.relative_to(path).as_posix() if path.is_dir() else path.name), text


def _row(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        if not isinstance(item.get("document"), str):
            raise ConfigError(f"the row {dict(item)!r:.80} has no document; give its name under 'document'")
        return dict(item)
    about: Mapping[str, Any] = getattr(item, "metadata", None) or {}
    if isinstance(text := getattr(item, "page_content", None), str):
        source = about.get("source")
        return _named(item, source or getattr(item, "id", None), text, is_page=source is not None)
    if isinstance(text := getattr(item, "text", None), str):
        return _named(item, getattr(item, "id_", None), text, is_page=False)
    raise ConfigError(
        f"a {type(item).__name__} is no document; give paths, rows with 'document' and 'text', or what a loader of LlamaIndex or "
        "LangChain returned"
    )


def _named(item: Any, name: Any, text: str, *, is_page: bool) -> dict[str, Any]:
    if not name:
        raise ConfigError(f"a {type(item).__name__} has no name; give it an id, or metadata with its source")
    return {"document": str(name), "text": text} | ({"page": True} if is_page else {})
