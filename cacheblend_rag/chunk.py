"""Chunks, the prompts made of them, and store keys: digests of all that a chunk's KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from cacheblend_rag.errors import ConfigError, EmptyChunkError, PromptError

__all__ = [
    "BLANK_LINE",
    "BlendPrompt",
    "Chunk",
    "ChunkPart",
    "ChunkRef",
    "FixedText",
    "HEAD_PREFIX",
    "PROMPT_KEY",
    "Segment",
    "carried_prompt",
    "check_text",
    "chunk_key",
    "chunk_list",
    "context_digest",
    "document_name",
    "id_list",
    "is_part",
    "out_of_date",
    "text_hash",
]

BLANK_LINE = "\n\n"
"""Separator that frameworks, and the server, put between chunks."""

# More than any text has, and its end is still a number that the store's index can hold.
_MOST_CHARACTERS = 2**62
# What Python, JSON and tables write in place of a value that is missing.
_MISSING = frozenset(("", "nan", "nat", "<na>", "none", "null"))


def text_hash(text: str) -> str:
    """Return the digest by which a chunk's text, as the model sees it, is recognised: 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def document_name(value: object) -> str | None:
    """Return the name of a document; None for what names none: a blank, NaN, a truth value, a collection."""
    is_collection = isinstance(value, Collection) and not isinstance(value, str)
    name = "" if isinstance(value, bool) or is_collection else str(value)
    return None if name.strip().casefold() in _MISSING else name


def check_text(text: str) -> None:
    """Raise `PromptError` for a text that holds half a character, which neither tokenizers nor JSON can have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text {text[:40]!r} has {text[error.start]!r} at character {error.start}, half of a UTF-16 pair, which no "
            'tokenizer can read; repair the text at its source, or replace it: text.encode(errors="replace").decode()'
        ) from None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of text whose KV is computed when it is added, and reused.

    Parameters
    ----------
    text : str
        The text exactly as the language model sees it.
    id : str, optional
        Identifies the chunk in prompts and calls, for example the node id of a vector store. A chunk without one can be
        blended, its KV being kept in RAM, but not added.
    token_ids : sequence of int, optional
        Its tokens, if they differ from the tokenizer's for `text`; the text is then only for people to read.
    positions : sequence of int, optional
        The position of each of `token_ids` in its prompts, ascending. By default they come right after the
        preamble, without gaps. If KV can be moved, only the gaps count; otherwise it is used only at these positions.
    document : str, optional
        The name of the document that the chunk is a piece of, with which it can be deleted. Its KV behind other chunks of a
        prompt is read behind another chunk of the document, and the end of what precedes it there. Only a chunk with an id can
        belong to a document. A blank name or NaN means no document.
    start : int, optional
        Where the chunk's body begins in the document, in characters. Chunks are ordered by it, and if two overlap, the first
        counts up to where the second begins. Of a chunk without it, nothing is known to stand before or behind it.
    body : (int, int), optional
        The half-open range of characters of `text` that come from the document; all of them by default. Other text, such as a
        block of metadata, counts neither for `start` nor as overlap.

    Raises
    ------
    EmptyChunkError
        If `text` is empty, or `token_ids`.
    ConfigError
        If `id` is an empty string, `positions` do not fit `token_ids`, or the chunk's place
        in its document is invalid.
    """

    text: str
    id: str | None = None
    token_ids: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    document: str | None = None
    start: int | None = None
    body: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.text:
            raise EmptyChunkError(
                f"chunk {self.id!r} has no text; leave it out, or give it the text the model should read"
            )
        if not isinstance(self.text, str) or not isinstance(self.id, str | None):
            raise ConfigError(
                f"a chunk's text and id are strings, not {type(self.text).__name__} and {type(self.id).__name__}; give "
                "Chunk(text, id), with str(...) if an id is a number"
            )
        if self.id == "":
            raise ConfigError("a chunk's id is the empty string; give another id, or None for a chunk without one")
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", tuple(self.token_ids))
            if not self.token_ids:
                raise EmptyChunkError(f"chunk {self.id!r} has an empty list of token ids; leave it out")
        if self.positions is not None:
            places = tuple(self.positions)
            object.__setattr__(self, "positions", places)
            if self.token_ids is None or len(places) != len(self.token_ids):
                raise ConfigError(
                    f"chunk {self.id!r} has {len(places)} positions; give token_ids, and one position for each"
                )
            if places[0] < 0 or any(after <= before for before, after in pairwise(places)):
                raise ConfigError(f"the positions of chunk {self.id!r} must ascend from 0 or more; they are {places}")
        if self.document is not None and document_name(self.document) is None:
            for name in ("document", "start", "body"):
                object.__setattr__(self, name, None)
        if self.document is not None:
            self._check_place()
        elif self.start is not None or self.body is not None:
            raise ConfigError(
                f"chunk {self.id!r} has a place (start={self.start}, body={self.body}) but no document; set document to the name "
                "of its document"
            )

    def _check_place(self) -> None:
        if not isinstance(self.document, str):
            raise ConfigError(f"the document of chunk {self.id!r} is {self.document!r:.40}; give its name, a string")
        if self.id is None:
            raise ConfigError(
                f"a chunk of document {self.document!r:.40} has no id; give it one, so that it can be found and deleted"
            )
        if self.token_ids is not None:
            raise ConfigError(
                f"chunk {self.id!r} of document {self.document!r:.40} has its own token ids, whose place in the document is "
                "unknown; leave out token_ids or document"
            )
        if self.start is not None and (type(self.start) is not int or not 0 <= self.start < _MOST_CHARACTERS):
            raise ConfigError(
                f"start={self.start!r} of chunk {self.id!r} must be a number of characters, from 0 to 2^62"
            )
        if self.body is not None:
            begin, end = self.body
            if not 0 <= begin <= end <= len(self.text):
                raise ConfigError(
                    f"body={self.body} of chunk {self.id!r} is not a range of its {len(self.text)} characters"
                )


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """The place of a stored chunk in a prompt, by its id.

    Parameters
    ----------
    id : str
        The id under which the chunk was added.
    """

    id: str


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Some of a chunk's tokens, from `start` to before `stop`, with their KV in the whole chunk.

    `ConfigError` if there are no such tokens, provided that the chunk says how many it has.
    """

    chunk: Chunk
    start: int
    stop: int

    def __post_init__(self) -> None:
        size = None if self.chunk.token_ids is None else len(self.chunk.token_ids)
        if not 0 <= self.start < self.stop or (size is not None and self.stop > size):
            raise ConfigError(
                f"there are no tokens from {self.start} to {self.stop} in chunk {self.chunk.id!r}"
                f"{'' if size is None else f', which has {size}'}"
            )


@dataclass(frozen=True, slots=True)
class FixedText:
    """Text that many prompts begin with: the system prompt, the head of a template.

    If a prompt begins with it, its KV is computed once and kept in the store, like a chunk's. So it must not contain
    user input, history or document text. Elsewhere it is ordinary text.

    Parameters
    ----------
    text : str
        The text.

    Raises
    ------
    ConfigError
        If `text` is not a string.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ConfigError(f"the fixed text is a {type(self.text).__name__}; give a string")


Segment: TypeAlias = "str | Sequence[int] | FixedText | Chunk | ChunkRef | ChunkPart"
"""Text, token ids (both always computed), fixed text (computed unless the prompt begins with it), a chunk, the id of a stored
chunk, or a part of a chunk (all served from KV)."""


@dataclass(frozen=True)
class BlendPrompt:
    """A prompt as a list of segments: text, always computed, and chunks, served from stored KV.

    ``BlendPrompt(prefix, chunks, suffix)`` is short for ``BlendPrompt(segments=[prefix, *chunks, suffix])``. The token
    ids of a prompt are the concatenation of its segments' ids, each tokenised on its own; the first text segment is
    given the tokenizer's BOS unless it begins with it.

    Parameters
    ----------
    prefix : str or FixedText
        Text before the chunks: the system prompt, the head of the template. As `FixedText` its KV is kept, too.
    chunks : sequence of (str, Chunk or ChunkRef)
        The chunks in order; a string is the id of a stored chunk.
    suffix : str
        Text after the chunks: the question and the tail of the template.
    separator : str
        Text between two chunks, computed like any other text.
    segments : sequence of Segment, optional
        The whole prompt at once, instead of the four above; here a string is text, and `ChunkRef` names a stored chunk.
    positions : sequence of int, optional
        The position of each segment's first token, in segment order. By default segments follow each other without
        gaps. After the first token of a chunk, its own `Chunk.positions` say where the gaps are.
    skip_unknown : bool
        Whether to leave out chunks with an unknown id (deleted by another process since they were retrieved), together with
        the separator next to them; the report lists them last. By default an unknown id raises an
        `UnknownChunkError`.

    Raises
    ------
    ConfigError
        If `segments` is given together with `prefix`, `chunks`, `suffix` or `separator`, or `positions` do not fit the
        segments, or are given with `skip_unknown`.
    """

    prefix: str | FixedText = ""
    chunks: Sequence[str | Chunk | ChunkRef] = ()
    suffix: str = ""
    separator: str = ""
    segments: Sequence[Segment] = field(default=())
    positions: Sequence[int] | None = None
    skip_unknown: bool = False

    def __post_init__(self) -> None:
        for name, given in (("chunks", self.chunks), ("segments", self.segments)):
            if isinstance(given, str):
                raise ConfigError(f"{name} is the string {given[:40]!r}; give a list, or the text as prefix")
            for each in given:
                if not isinstance(each, str | FixedText | Chunk | ChunkRef | ChunkPart | Iterable):
                    raise ConfigError(
                        f"{name} holds {each!r}, a {type(each).__name__}; give ids, Chunk or ChunkRef objects, and as segments "
                        "also texts, lists of token ids or ChunkPart objects"
                    )
        if self.segments:
            if self.prefix or self.chunks or self.suffix or self.separator:
                raise ConfigError("a prompt takes either segments, or prefix, chunks, suffix and separator, not both")
        else:
            segments: list[Segment] = [self.prefix] if self.prefix else []
            for number, chunk in enumerate(self.chunks):
                if number and self.separator:
                    segments.append(self.separator)
                segments.append(ChunkRef(chunk) if isinstance(chunk, str) else chunk)
            object.__setattr__(self, "segments", (*segments, self.suffix) if self.suffix else tuple(segments))
        if self.positions is not None:
            if self.skip_unknown:
                raise ConfigError("a prompt with positions cannot leave segments out; do not set skip_unknown")
            if len(self.positions) != len(self.segments):
                raise ConfigError(
                    f"{len(self.positions)} positions for {len(self.segments)} segments; give one for each"
                )
            if any(position < 0 for position in self.positions):
                raise ConfigError(f"positions {list(self.positions)} include a negative one; positions count from 0")

    def without(self, ids: Container[str]) -> BlendPrompt:
        """Return the prompt without the chunks that are named by these ids, and the separator beside each."""

        def stays(segment: object) -> bool:
            return not isinstance(segment, ChunkRef) or segment.id not in ids

        if not self.chunks:
            return replace(self, segments=[segment for segment in self.segments if stays(segment)])
        chunks = [each for each in self.chunks if stays(ChunkRef(each) if isinstance(each, str) else each)]
        return replace(self, chunks=chunks, segments=())


def id_list(ids: Iterable[str]) -> list[str]:
    """Return ids as a list; `ConfigError` for a single string."""
    if isinstance(ids, str):
        raise ConfigError(f"ids is the string {ids[:40]!r}; give a list of ids")
    return list(ids)


def chunk_list(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return chunks as a list; `ConfigError` for a single one, or what is none."""
    if isinstance(chunks, Chunk):
        raise ConfigError("chunks is a single Chunk; give a list of them, as in [Chunk(text, id)]")
    chunks = list(chunks)
    for chunk in chunks:
        if not isinstance(chunk, Chunk):
            raise ConfigError(f"{chunk!r} is a {type(chunk).__name__}; give Chunk objects, as in Chunk(text, id)")
        if chunk.id is None:
            raise ConfigError(
                f"the chunk {chunk.text[:40]!r} has no id to be found and deleted by; give it one, as in Chunk(text, id)"
            )
        if chunk.id.startswith(HEAD_PREFIX):
            raise ConfigError(
                f"the id {chunk.id!r} begins with {HEAD_PREFIX!r}, which is reserved for prompt heads; give the chunk another id"
            )
    return chunks


PROMPT_KEY = "cacheblend_prompt"
"""Key under which a text (an attribute) or a message (`additional_kwargs`) carries a prompt, as of `cacheblend_pml`."""


def carried_prompt(given: Sequence[Any], engine: Any, **beside: object) -> BlendPrompt | None:
    """Return for an engine the prompt that a text or messages of either framework carry; `PromptError` for anything beside it."""
    if isinstance(given, str):
        found: list[Any] = [getattr(given, PROMPT_KEY)] if hasattr(given, PROMPT_KEY) else []
    else:
        found = [each.additional_kwargs[PROMPT_KEY] for each in given if PROMPT_KEY in each.additional_kwargs]
        beside["other messages"] = found and len(given) > 1
    if not found:
        return None
    others = [name for name, value in beside.items() if value]
    if others or not hasattr(found[0], "blend"):
        raise PromptError(
            f"a schema's prompt must be the whole conversation, but the call has {', '.join(others) or 'only its text'}; "
            "put messages and the model's system prompt into the schema or the prompt, as <system>, <user> and <assistant>, and "
            "documents in the place of a module (PMLPromptTemplate, documents=)"
        )
    prompt: BlendPrompt = found[0].blend(engine)
    return prompt


def is_part(id: str) -> bool:
    """Return whether a chunk is a part of a schema (`cacheblend_pml`): its text is a label, and no vector store knows its id."""
    return id.startswith("pml/")


def out_of_date(ids: Iterable[str], present: Iterable[str]) -> list[str]:
    """Return those of an engine's ids that are not among the ones present, parts of schemas aside."""
    stay = set(id_list(present))
    return [id for id in ids if id not in stay and not is_part(id)]


HEAD_PREFIX = "cacheblend/head/"
"""Beginning of the names of prompts' fixed heads, and of no chunk's id."""


def chunk_key(
    namespace: str,
    token_ids: Sequence[int],
    places: Sequence[int] | None = None,
    context: str = "",
    *,
    is_head: bool = False,
) -> str:
    """Return the key of the KV of a chunk, or of what prompts begin with: 40 hexadecimal digits (blake2b, 160 bits)."""
    # Keys of what is read right behind the preamble stay what they are in every store there is.
    placed = b"" if places is None else b"|at|" + np.asarray(places, "<i4").tobytes()
    before = b"|head|" if is_head else b"" if not context else b"|behind|" + context.encode()
    tokens = np.asarray(token_ids, "<i4").tobytes()
    return hashlib.blake2b(namespace.encode() + tokens + placed + before, digest_size=20).hexdigest()


def context_digest(context: Sequence[int]) -> str:
    """Return 32 hexadecimal digits of a context's token ids; the empty string where there are none."""
    return hashlib.blake2b(np.asarray(context, "<i4").tobytes(), digest_size=16).hexdigest() if context else ""
