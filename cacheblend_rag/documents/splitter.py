"""Files of text, and of what can be converted to text, cut into passages of bounded length."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from cacheblend_rag.chunk import Chunk, text_hash
from cacheblend_rag.errors import ConfigError, needs_extra

__all__ = ["SUFFIXES", "cut", "named_chunks", "read_files", "split_text"]

_CONVERTED = (".pdf", ".docx", ".html", ".htm")
SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", *_CONVERTED)
"""Files that are read in folders."""
# What is no text has a NUL byte among so many, as a rule.
_BEGINNING_BYTES = 2**16
_MARKDOWN = re.compile(r"^(#{1,6} |```|~~~)", re.MULTILINE)

TokenCount = Callable[[str], int]


def read_files(paths: Sequence[Path]) -> tuple[dict[str, str], dict[Path, str]]:
    """Read files, and those in folders, each once; return texts by absolute paths, and why files were left out.

    A name that is not UTF-8 cannot stand in an index: such a file is left out too, under a name that can be printed.
    """
    texts: dict[str, str] = {}
    left_out: dict[Path, str] = {}
    seen: set[str] = set()
    for file in chain.from_iterable(_files(path, left_out) if path.is_dir() else [path] for path in paths):
        if (found := os.path.realpath(file)) in seen:
            continue
        seen.add(found)
        # Not where a link leads: what is gone from the folder is looked for below it.
        path = os.path.abspath(file)
        if (said := os.fsencode(path).decode(errors="replace")) != path:
            left_out[Path(said)] = "its name is not UTF-8; rename it"
            continue
        try:
            texts[path] = _converted(file) if file.suffix.lower() in _CONVERTED else _plain(file)
        except (ConfigError, UnicodeDecodeError) as error:
            left_out[file] = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        except OSError as error:
            left_out[file] = str(error.strerror)
    return texts, left_out


def _files(folder: Path, left_out: dict[Path, str]) -> Iterator[Path]:
    """Yield the files below a folder that may have text, but for hidden ones and those in linked folders."""

    def leave_out(error: OSError) -> None:
        left_out[Path(error.filename)] = str(error.strerror)

    for place, folders, names in os.walk(folder, onerror=leave_out):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file())


def cut(texts: Mapping[str, str], count_tokens: TokenCount, chunk_tokens: int) -> list[Chunk]:
    """Cut texts into passages of at most `chunk_tokens` tokens, by the names of the texts, in reading order."""
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={chunk_tokens} must be at least 1")
    named = (named_chunks(name, split_text(texts[name], count_tokens, chunk_tokens)) for name in sorted(texts))
    return list(chain.from_iterable(named))


def _plain(file: Path) -> str:
    """Return the text of a file; of what is none, no more than its beginning is read."""
    if file.exists() and not file.is_file():
        raise ConfigError("it is not a file")
    with open(file, "rb") as opened:
        data = opened.read(_BEGINNING_BYTES)
        if b"\0" not in data:
            data += opened.read()
    if b"\0" in data:
        raise ConfigError("it has NUL bytes, so it is not UTF-8 text")
    return data.decode("utf-8-sig")


def _converted(file: Path) -> str:
    """Return the text of a file of another format."""
    with needs_extra("files", "its format"):
        convert = _of_pdf if file.suffix.lower() == ".pdf" else _as_markdown
        try:
            text = convert(file)
        except ImportError:
            raise
        except Exception as error:  # each format's library has its own
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise ConfigError(f"it cannot be converted to text: {reason.strip(' -')}") from error
    if not text.strip() or "\0" in text:
        raise ConfigError("no text was found in it; if its pages are images, convert them with OCR first")
    return text


def _as_markdown(file: Path) -> str:
    from markitdown import MarkItDown

    return str(MarkItDown().convert_local(file).markdown)


def _of_pdf(file: Path) -> str:
    # PDFium finds the blanks between words that a page only leaves as room.
    from pypdfium2 import PdfDocument

    with PdfDocument(file) as document:
        pages = [page.get_textpage().get_text_range() for page in document]
    # This stands for a hyphen at the end of a line.
    return "\n\n".join(pages).replace("\ufffe", "").replace("\r\n", "\n")


def named_chunks(document: str, pieces: Sequence[str]) -> Iterator[Chunk]:
    """Yield the pieces of a document, in the order of reading, as chunks.

    An id is the document's name and a digest of the text: a piece that moves keeps its id, one that changes does not. `start`
    counts characters of the pieces with a blank line between them.
    """
    seen: Counter[str] = Counter()
    start = 0
    for piece in pieces:
        digest = text_hash(piece)[:16]
        seen[digest] += 1
        # The same words twice in one document are two chunks.
        number = f".{seen[digest]}" if seen[digest] > 1 else ""
        yield Chunk(piece, f"{document}#{digest}{number}", document=document, start=start)
        start += len(piece) + len("\n\n")


def split_text(text: str, count_tokens: TokenCount, chunk_tokens: int) -> list[str]:
    """Cut plain text or Markdown into pieces of at most `chunk_tokens` tokens, at headings, paragraphs and sentences."""
    with needs_extra("documents", "cutting documents"):
        from semantic_text_splitter import MarkdownSplitter, TextSplitter
    # To Markdown, a line of asterisks under a heading would be a rule across the page.
    splitter = MarkdownSplitter if _MARKDOWN.search(text) else TextSplitter
    pieces = map(str.strip, splitter.from_callback(count_tokens, chunk_tokens).chunks(text))
    return [piece for piece in pieces if piece]
