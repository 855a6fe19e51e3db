"""From the segments of a prompt to token ids, rows and store keys."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from operator import index
from typing import Any

import numpy as np

from cacheblend_rag.chunk import HEAD_PREFIX, BlendPrompt, Chunk, ChunkPart, ChunkRef, FixedText, chunk_key, text_hash
from cacheblend_rag.companions import Companions
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine.answering import AnsweringStore
from cacheblend_rag.engine.backend import EncodingModel
from cacheblend_rag.errors import (
    ConfigError,
    EmptyChunkError,
    PromptError,
    PromptTooLongError,
    StoreError,
    UnknownChunkError,
)
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.preamble import default_preamble
from cacheblend_rag.prompt import AssembledPrompt, PromptChunk, PromptHead
from cacheblend_rag.report import OTHER_TEXT
from cacheblend_rag.store import NodeRecord

__all__ = ["LEAST_HEAD", "Assembler"]

logger = logging.getLogger(__name__)

LEAST_HEAD = 8
"""Fixed text of fewer tokens is simply computed: in the shape of Qwen2-0.5B, before 32 tokens of text, 8 are worth 8 % of the
time to the first token, 4 are worth 5 %, and 2 nothing."""

_LEAST_WINDOWS = 4
"""A window holds no fewer preambles: a longer default one is cut at its end."""


# Why nothing is known of a chunk.
_NAMELESS = "it has no id, and no chunk with its text was added"
_NEVER = "it was never added under its id, was deleted, or was in a store in RAM before a restart"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens without gaps, and what they are of; without a position they follow what is before."""

    ids: tuple[int, ...]
    position: int | None = None
    chunk: PromptChunk | None = None
    is_fixed: bool = False


class Assembler:
    """Turns prompts into token ids, each segment tokenised on its own."""

    def __init__(self, model: EncodingModel, store: AnsweringStore, identity: str, config: EngineConfig) -> None:
        self.tokenizer = tokenizer = model.tokenizer
        self._num_embeddings, self._window_hint = model.num_embeddings, model.window_hint
        # Words that were added may lie beyond: a token of one is refused in the text that has it.
        words = getattr(tokenizer, "vocab_size", 0)
        if words > self._num_embeddings:
            raise ConfigError(
                f"the tokenizer has a vocabulary of {words} words, and the model embeddings for {self._num_embeddings} only; "
                "give the model's own tokenizer"
            )
        self._store = store
        self._window, form = model.window, model.form
        # Otherwise a chunk's KV serves only where it was encoded, right after the preamble.
        self._is_movable = form is None or form.is_movable
        bos = getattr(tokenizer, "bos_token_id", None)
        self._bos: tuple[int, ...] = () if bos is None else (bos,)
        self.preamble: tuple[int, ...] = self._preamble(config.preamble, form)
        reach = None if form is None or form.rope_reach is None else form.rope_reach - 1
        limits = [max(end - len(self.preamble), 0) for end in (self._window, reach) if end is not None]
        self.separator = self.tokenize(config.separator) if self._is_movable else ()
        is_blended = form is not None and self._is_movable
        # Whether it matters where in its document each token ends.
        self._reads_documents = is_blended and config.companions != "neutral"
        # Part of every key, so that one tenant cannot ask for another's KV. Without a tenant nothing is appended.
        owner = "" if config.tenant is None else f"|{config.tenant}"
        if lexer_of(tokenizer).has_prefix:
            # Before, a blank was put before each chunk.
            owner = f"{owner}|chunks go on"
        self.namespace = hashlib.blake2b(f"{identity}|{self.preamble}{owner}".encode(), digest_size=16).hexdigest()
        self.companions = (
            Companions(
                config.companions,
                self.namespace,
                self.separator,
                min(limits, default=None),
                self.tokenize,
                lambda: self._store.store.names,
            )
            if is_blended
            else None
        )

    def _preamble(self, wanted: str | Sequence[int] | None, form: Decoder | ModelCard | None) -> tuple[int, ...]:
        if wanted is None and form is not None and self._is_movable:
            most = None if self._window is None else self._window // _LEAST_WINDOWS
            return self.tokenize(default_preamble(self.tokenizer), begins=True)[:most]
        return self.tokenize(wanted or "", begins=wanted is None or isinstance(wanted, str))

    def tokenize(self, text: str | Sequence[int], *, begins: bool = False) -> tuple[int, ...]:
        """Return the ids of a text or ids that go on or, with the BOS, begin a prompt; `PromptError` if it cannot be read."""
        given = lexer_of(self.tokenizer).read(text, begins=begins)[0] if isinstance(text, str) else text
        try:
            ids = tuple(map(index, given))
        except TypeError:
            raise PromptError(
                f"token ids are whole numbers, and {given!r:.80} holds something else; give integers"
            ) from None
        # On a GPU, an index beyond the embedding ends the process.
        if ids and not 0 <= min(ids) <= max(ids) < self._num_embeddings:
            wrong = next(each for each in ids if not 0 <= each < self._num_embeddings)
            spelled = self.tokenizer.decode([wrong]) if 0 <= wrong < len(self.tokenizer) else ""
            raise PromptError(
                f"token {wrong}{spelled and f', {spelled!r},'} is none of the {self._num_embeddings} tokens that the model has "
                "embeddings for; leave it out, or enlarge the model with resize_token_embeddings(len(tokenizer))"
            )
        return ids if not begins or ids[: len(self._bos)] == self._bos else self._bos + ids

    def places(self, chunk: Chunk) -> tuple[int, ...] | None:
        """Return the positions of a chunk's tokens when they are encoded; None for right after the preamble, without gaps."""
        if chunk.positions is None:
            return None
        start = len(self.preamble)
        # If KV can be moved, a chunk is encoded right after the preamble wherever it will be used, and only its gaps count.
        first = start - chunk.positions[0] if self._is_movable else 0
        places = tuple(place + first for place in chunk.positions)
        return None if places == tuple(range(start, start + len(places))) else places

    def is_placed(self, record: NodeRecord) -> bool:
        """Whether a chunk's tokens have positions of their own, so that its KV serves no other place."""
        return record.key != chunk_key(self.namespace, record.token_ids + record.separator)

    def record(self, chunk: Chunk) -> NodeRecord:
        """Tokenise a chunk, or raise why it cannot be served; what it is read behind is not chosen yet."""
        length, ends = 0, tuple[int, ...]()
        if chunk.token_ids is not None:
            ids = self.tokenize(chunk.token_ids)
        elif chunk.start is None or not self._reads_documents:
            ids = self.tokenize(lexer_of(self.tokenizer).said(chunk.text))
        else:
            ids, length, ends = self._placed(chunk)
            if max(ids, default=0) >= self._num_embeddings:
                self.tokenize(ids)
        if not ids:
            raise EmptyChunkError(
                f"the text of chunk {chunk.id!r}, {chunk.text[:40]!r}, has no tokens; leave the chunk out"
            )
        if self._window is not None and len(self.preamble) + len(ids) > self._window:
            raise PromptTooLongError(
                f"chunk {chunk.id!r} has {len(ids)} tokens; after the preamble that is more than the "
                f"model's window of {self._window}; split it"
            )
        places = None if chunk.positions is None else self.places(chunk)
        if self._window is not None and places is not None and places[-1] >= self._window:
            raise PromptTooLongError(
                f"chunk {chunk.id!r} reaches position {places[-1]}, but the model's window is {self._window}; make the gaps "
                "before it or inside it smaller"
            )
        # A prompt that places its segments has its own idea of what stands between them.
        separator = self.separator if chunk.positions is None else ()
        key = chunk_key(self.namespace, ids + separator, places)
        said = chunk.id or "", key, text_hash(chunk.text), ids, separator
        return NodeRecord(*said, chunk.document, chunk.start, length, ends)

    def _placed(self, chunk: Chunk) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Return the tokens of a piece of a document, the characters of its body, and how many of them each token ends with."""
        begin, end = (0, len(chunk.text)) if chunk.body is None else chunk.body
        lexer = lexer_of(self.tokenizer)
        ids, stops = lexer.read(lexer.said(chunk.text), placed=True)
        stops = stops or [len(lexer.text(ids[: count + 1])) for count in range(len(ids))]
        ends = np.maximum.accumulate(np.asarray(stops, dtype=np.int64)) - begin
        return tuple(ids), end - begin, tuple(ends.clip(min=0).tolist())

    def assemble(self, prompt: BlendPrompt) -> AssembledPrompt:
        """Look up and tokenise a whole prompt, or raise the `CacheBlendError` that says why it cannot be served."""
        if not isinstance(prompt, BlendPrompt):
            raise ConfigError(
                f"the prompt is a {type(prompt).__name__}; give a BlendPrompt, as in BlendPrompt(text, chunks), or for a "
                "schema's prompt Schemas(engine).prompt(prompt)"
            )
        known = self._known(prompt.segments)
        named = dict.fromkeys(segment.id for segment in prompt.segments if isinstance(segment, ChunkRef))
        skipped = tuple(id for id in named if known is not None and id not in known) if prompt.skip_unknown else ()
        if skipped:
            logger.warning("these chunk ids no longer exist and were left out of a prompt: %s", ", ".join(skipped))
            prompt = prompt.without(skipped)
        pieces = self._pieces(prompt, known)
        # Text at the end may have no tokens: blanks, for example.
        while len(pieces) > 1 and not pieces[-1].ids:
            pieces.pop()
        last = len(pieces) - 1
        head = None if prompt.positions is not None else self._head(pieces)
        ids: list[int] = []
        places: list[int] = []
        chunks: list[PromptChunk] = []
        context: tuple[int, int] | None = None
        # The separator after a chunk, which its KV covers, is of the chunk, if the prompt continues behind it.
        is_covered = False
        for number, piece in enumerate(pieces):
            if is_covered:
                is_covered = False
                continue
            chunk, own, row = piece.chunk, piece.ids, len(ids)
            if chunk is not None and chunk.separator and prompt.positions is None and number + 1 < last:
                following = pieces[number + 1]
                is_covered = following.chunk is None and following.ids == chunk.separator and own == chunk.token_ids
                own = chunk.kv_ids if is_covered else own
            position = row if piece.position is None else piece.position
            ids.extend(own)
            places.extend(range(position, position + len(own)))
            if chunk is not None:
                chunk = replace(chunk, start=row, stop=len(ids), position=position, follows=bool(chunks))
                chunks.append(self._served(chunk, is_last=number == last, is_placed=prompt.positions is not None))
                if number < last:
                    context = (context[0] if context else row, len(ids))
        if not ids:
            raise PromptError("the prompt has no tokens; give it at least a question")
        end = max(places) + 1
        if self._window is not None and max(len(ids), end) >= self._window:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens and ends at position {end}; the window is {self._window} tokens, one of "
                f"which is needed for the answer: shorten the text{', or retrieve fewer or shorter chunks' if chunks else ''}"
                f"{self._window_hint}"
            )
        blended = tuple(chunk for chunk in chunks if chunk.computed is None)
        layout = PromptLayout(tuple(ids), tuple(places), blended)
        return AssembledPrompt(
            layout,
            blended,
            tuple(chunk for chunk in chunks if chunk.computed is not None),
            None if prompt.positions is None else layout.positions,
            context or (0, 0),
            head,
            skipped,
        )

    def _served(self, chunk: PromptChunk, *, is_last: bool, is_placed: bool) -> PromptChunk:
        """Return a chunk at its place with the KV that serves it there, or with the reason why it is computed like text."""
        if chunk.follows and not is_placed and chunk.positions is None and self.companions is not None:
            later = chunk.later
            if later is None:
                record = NodeRecord(chunk.id or "", chunk.key, "", chunk.token_ids, chunk.separator, chunk.document)
                members = self._store.members(self.namespace, chunk.document)
                [later] = self.companions.choose([record], {chunk.document or "": members})
            chunk = replace(chunk, key=later.key, later=later)
        if chunk.computed is not None:
            return chunk
        if is_last:
            # The last token's logits are what the prompt is for, so its row is computed.
            return replace(chunk, computed="last", note="the prompt ends with it, so it is computed like text")
        places, first = chunk.positions, chunk.first
        encoded_at = len(self.preamble) + first if places is None else places[first]
        if not self._is_movable and chunk.position != encoded_at:
            note = (
                f"it is at position {chunk.position}, but the KV of this model, encoded at {encoded_at}, cannot be moved, "
                "so it is computed like text"
            )
            return replace(chunk, computed="moved", note=note)
        return chunk

    def _head(self, pieces: Sequence[_Piece]) -> PromptHead | None:
        """Return the fixed text that a prompt begins with; None where there is too little of it."""
        ids = tuple(chain.from_iterable(piece.ids for piece in takewhile(lambda piece: piece.is_fixed, pieces)))
        rows = min(len(ids), sum(len(piece.ids) for piece in pieces) - 1)
        return PromptHead(chunk_key(self.namespace, ids, is_head=True), ids, rows) if rows >= LEAST_HEAD else None

    def _pieces(self, prompt: BlendPrompt, known: dict[str, NodeRecord] | None) -> list[_Piece]:
        """Cut a prompt into runs of tokens that follow each other without gaps and come from one place."""
        segments = list(prompt.segments)
        positions = None if prompt.positions is None else list(prompt.positions)
        if segments and isinstance(segments[0], Chunk | ChunkRef | ChunkPart) and self._bos and positions is None:
            segments.insert(0, "")
        # Separators recur between all chunks: each text is tokenised once.
        texts: dict[tuple[str, bool], tuple[int, ...]] = {}
        pieces: list[_Piece] = []
        for number, segment in enumerate(segments):
            position = None if positions is None else positions[number]
            if isinstance(segment, Chunk | ChunkRef | ChunkPart):
                pieces += _runs(segment, self._chunk(segment, known), position)
                continue
            text = segment.text if isinstance(segment, FixedText) else segment
            if not isinstance(text, str):
                ids = self.tokenize(text, begins=not number)
            elif (text, not number) in texts:
                ids = texts[text, not number]
            else:
                ids = texts[text, not number] = self.tokenize(text, begins=not number)
            pieces.append(_Piece(ids, position, is_fixed=isinstance(segment, FixedText)))
        return pieces

    def _known(self, segments: Sequence[Any]) -> dict[str, NodeRecord] | None:
        """Return what is recorded of the chunks that segments name; if it cannot be read, None, or `StoreError` for a bare id."""
        wanted = [segment.chunk if isinstance(segment, ChunkPart) else segment for segment in segments]
        ids = [each.id for each in wanted if isinstance(each, Chunk | ChunkRef) and each.id]
        # What is kept of prompts' heads is no chunk, and stands nowhere else.
        named = [each for each in ids if not each.startswith(HEAD_PREFIX)]
        found = self._store.lookup(self.namespace, named) if named else []
        if found is None:
            bare = next((each.id for each in wanted if isinstance(each, ChunkRef)), None)
            if bare is not None:
                raise StoreError(
                    f"the ids in the store cannot be read now, so chunk {bare!r} cannot be looked up; see the log for why. Pass "
                    "chunks with their text, or try again later"
                )
            return None
        return {record.id: record for record in found if record is not None}

    def _chunk(self, segment: Chunk | ChunkRef | ChunkPart, known: dict[str, NodeRecord] | None) -> PromptChunk:
        """Return what is known of the chunk of a segment, not placed yet."""
        chunk = segment.chunk if isinstance(segment, ChunkPart) else segment
        record = None if known is None else known.get(chunk.id or "")
        if isinstance(chunk, ChunkRef) and record is None:
            raise UnknownChunkError(
                f"no chunk has the id {chunk.id!r}: it was never added for this model, tokenizer, preamble and "
                "tenant, was deleted, or was added to a store in RAM before a restart; add it, or pass the chunk itself"
            )
        if record is not None and (
            isinstance(chunk, ChunkRef) or (chunk.token_ids is None and record.text_hash == text_hash(chunk.text))
        ):
            return _unplaced(record.id, record, later=record.later, named=True)
        assert isinstance(chunk, Chunk)
        fresh = self.record(chunk)
        if known is None and chunk.id is not None:
            # Its id may have been deleted, and its KV with it.
            note = "the ids in the store cannot be read now, so it is computed like text"
            alone = replace(fresh, separator=())
            return _unplaced(chunk.id, alone, positions=self.places(chunk), computed="unread", note=note)
        is_other = record is not None and record.key != fresh.key
        return _unplaced(
            chunk.id,
            fresh,
            positions=self.places(chunk),
            named=record is not None and not is_other,
            note=OTHER_TEXT if is_other else None if record is not None else _NEVER if chunk.id else _NAMELESS,
        )


def _unplaced(id: str | None, record: NodeRecord, **known: Any) -> PromptChunk:
    """Return a chunk that is still to be given its place in a prompt."""
    return PromptChunk(
        start=0,
        stop=0,
        position=0,
        id=id,
        key=record.key,
        token_ids=record.token_ids,
        separator=record.separator,
        document=record.document if known.get("named") else None,
        **known,
    )


def _runs(segment: Chunk | ChunkRef | ChunkPart, chunk: PromptChunk, position: int | None) -> Iterator[_Piece]:
    """Cut what stands of a chunk where its positions have gaps, which are refused unless the prompt places its segments."""
    size = len(chunk.token_ids)
    start, stop = (segment.start, segment.stop) if isinstance(segment, ChunkPart) else (0, size)
    if stop > size:
        raise ConfigError(f"there are no tokens from {start} to {stop} in chunk {chunk.id!r}, which has {size}")
    places = chunk.positions
    cuts = [] if places is None else [n for n in range(start + 1, stop) if places[n] != places[n - 1] + 1]
    if cuts and position is None:
        raise ConfigError(
            f"chunk {chunk.id!r} has gaps between its positions; give the prompt's segments positions as well"
        )
    for begin, end in pairwise([start, *cuts, stop]):
        at = position if position is None or places is None else position + places[begin] - places[start]
        yield _Piece(chunk.token_ids[begin:end], at, replace(chunk, first=begin) if begin else chunk)
