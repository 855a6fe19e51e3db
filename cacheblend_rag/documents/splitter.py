"""Files of text and markdown, cut into passages of bounded length."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cacheblend_rag.chunk import Chunk, text_hash
from cacheblend_rag.errors import ConfigError

__all__ = ["Passage", "named_passages", "read_passages", "read_texts", "split_text"]

_SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst"}
_HEADING = re.compile(r"#{1,6} ")
_FENCE = re.compile(r"(```|~~~)")
# Where a paragraph that is too long may be cut, best place first.
_CUTS = (re.compile(r"\n"), re.compile(r"(?<=[.!?])\s+(?=\S)|(?<=[。！？])"), re.compile(r"(?<=\s)(?=\S)"))

TokenCount = Callable[[str], int]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file."""

    # The file's path and a digest of the text: a passage that moves within its file keeps its id, one that changes does
    # not.
    id: str
    # The absolute path of the file, and the number of the passage in it, from 0.
    source: str
    position: int
    text: str
    # Where it begins, in characters, in the file's passages with a blank line between them.
    start: int = 0

    @property
    def chunk(self) -> Chunk:
        """The chunk of the passage: a piece of the file that it stands in."""
        return Chunk(self.text, self.id, document=self.source, start=self.start)


def read_passages(
    paths: Sequence[Path], count_tokens: TokenCount, chunk_tokens: int
) -> tuple[list[Passage], list[str]]:
    """Read files as `read_texts` does, and cut them into passages of at most `chunk_tokens` tokens, by path, in reading order.

    The second list has a sentence for each file that was left out. `ConfigError` if a path names a file that cannot be
    read.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={chunk_tokens} must be at least 1")
    passages: dict[str, list[Passage]] = {}
    skipped: list[str] = []
    seen: set[Path] = set()
    for path in paths:
        for file, text in read_texts(path, skipped.append):
            if (found := file.resolve()) in seen:
                continue
            seen.add(found)
            # Not where a link leads: what is gone from the folder is looked for below it.
            source = os.path.abspath(file)
            passages[source] = list(named_passages(source, split_text(text, count_tokens, chunk_tokens)))
    return [passage for source in sorted(passages) for passage in passages[source]], skipped


def read_texts(path: Path, tell: Callable[[str], object] = _log.warning) -> Iterator[tuple[Path, str]]:
    """Yield a file and its text, or for a folder all text and markdown files below it and theirs, but for hidden ones.

    `tell` is called with a sentence for each file in a folder that cannot be read, and is left out; `ConfigError` if `path`
    is a file that cannot be read, or is not UTF-8 text.
    """
    for file in _files(path) if path.is_dir() else [path]:
        try:
            yield file, file.read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError) as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
            if not path.is_dir():
                raise ConfigError(f"{file} cannot be read: {reason}") from error
            tell(f"{file} is left out: {reason}")


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file() and path.suffix.lower() in _SUFFIXES:
            yield path


def named_passages(source: str, pieces: Sequence[str]) -> Iterator[Passage]:
    """Yield the pieces of a document, in the order of reading, as passages; `source` is the document's name."""
    seen: dict[str, int] = {}
    start = 0
    for position, piece in enumerate(pieces):
        digest = text_hash(piece)[:16]
        seen[digest] = number = seen.get(digest, 0) + 1
        # The same words twice in one file are two passages.
        yield Passage(f"{source}#{digest}" + (f".{number}" if number > 1 else ""), source, position, piece, start)
        start += len(piece) + len("\n\n")


def split_text(text: str, count_tokens: TokenCount, chunk_tokens: int) -> list[str]:
    """Cut plain text or markdown into pieces of at most `chunk_tokens` tokens, at paragraphs as far as they fit.

    A heading stays with the paragraph below it, and begins a new piece when the one before is at least half full. There is
    no white space around pieces, and none is empty; only a single character may have more tokens.
    """
    pieces: list[str] = []
    current = ""
    for block in _blocks(text):
        joined = f"{current}\n\n{block}" if current else block
        heads = _HEADING.match(block) is not None and current and count_tokens(current) * 2 >= chunk_tokens
        if not heads and count_tokens(joined) <= chunk_tokens:
            current = joined
            continue
        if current:
            pieces.append(current)
        *full, current = _cut(block, count_tokens, chunk_tokens)
        pieces.extend(full)
    return [*pieces, current] if current else pieces


def _blocks(text: str) -> Iterator[str]:
    """Yield paragraphs; a fenced block of code is one, and a heading is part of what follows it."""
    lines: list[str] = []
    heading_only = False
    fence = ""
    for line in [*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        marker = _FENCE.match(line.lstrip())
        if marker is not None and (not fence or marker[1] == fence):
            fence = "" if fence else marker[1]
        if not fence and _HEADING.match(line) is not None and not heading_only:
            if lines:
                yield "\n".join(lines).strip()
            lines, heading_only = [line.rstrip()], True
        elif line.strip() or fence:
            lines.append(line.rstrip())
            heading_only = heading_only and _HEADING.match(line) is not None
        elif heading_only:
            lines.append("")
        elif lines:
            yield "\n".join(lines).strip()
            lines = []
    if any(lines):
        yield "\n".join(lines).strip()


def _cut(block: str, count_tokens: TokenCount, chunk_tokens: int, level: int = 0) -> list[str]:
    """Cut a paragraph that is too long at line breaks, else after sentences, else between words, else anywhere."""
    if count_tokens(block) <= chunk_tokens or len(block) == 1:
        return [block]
    if level == len(_CUTS):
        half = len(block) // 2
        return [
            piece for part in (block[:half], block[half:]) for piece in _cut(part, count_tokens, chunk_tokens, level)
        ]
    starts = [0, *(match.end() for match in _CUTS[level].finditer(block)), len(block)]
    parts = [block[start:stop] for start, stop in pairwise(starts) if block[start:stop].strip()]
    pieces: list[str] = []
    current = ""
    for part in parts:
        if current and count_tokens((current + part).strip()) <= chunk_tokens:
            current += part
            continue
        if current:
            pieces.append(current.strip())
        *full, current = _cut(part, count_tokens, chunk_tokens, level + 1)
        pieces.extend(full)
    return [*pieces, current.strip()] if current.strip() else pieces
