"""Schemas that an engine serves: their modules are chunks of its store, and their prompts become blended prompts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkPart, Segment
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddResult
from cacheblend_rag.engine.ingest import Ingest
from cacheblend_rag.engine.prefetch import Prefetcher
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.pml.layout import SchemaLayout
from cacheblend_rag.pml.nodes import SchemaTree
from cacheblend_rag.pml.parts import Part, PromptSegment
from cacheblend_rag.pml.place import lay_out
from cacheblend_rag.pml.prompt import Prompt
from cacheblend_rag.pml.tokens import Tokens
from cacheblend_rag.store import KVStore

__all__ = ["SCHEMA_PREFIX", "LoadedSchema", "Schemas"]

SCHEMA_PREFIX = "pml/"
"""What the ids of schemas' parts begin with, and no other chunk's."""

_MOST_LAYOUTS = 64
"""Layouts kept of schemas that were not loaded, such as those made of retrieved documents."""
_MOST_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class LoadedSchema:
    """What loading a schema did.

    Attributes
    ----------
    name : str
        The schema's name.
    parts : int
        What is encoded apart: modules, anonymous texts and scaffolds.
    tokens : int
        Their tokens.
    encoded, unchanged, removed : int
        Parts whose KV was computed, that were stored already under the same name, and that were forgotten because only an
        earlier version of the schema had them.
    """

    name: str
    parts: int
    tokens: int
    encoded: int
    unchanged: int
    removed: int


class Schemas:
    """The schemas of one engine.

    A part of a schema is an ordinary chunk. Its id, ``pml/<schema>/<part>``, is its name while the schema is loaded; its key is
    made of its tokens and the gaps between them, and of its position only where the model's positions are learned. So a module
    that moves because another has grown keeps its KV, and a module that is a stored document has it already.

    Parameters
    ----------
    assembler : Assembler
        Tokenises, and knows where names are.
    ingest : Ingest
        Encodes parts.
    store : KVStore
        Where they are kept.
    prefetcher : Prefetcher
        Brings what may be asked for next into memory.
    """

    def __init__(self, assembler: Assembler, ingest: Ingest, store: KVStore, prefetcher: Prefetcher) -> None:
        self._assembler = assembler
        self._ingest = ingest
        self._store = store
        self._prefetcher = prefetcher
        tokens = Tokens.of(assembler.tokenizer)
        # Schemas that are made for one prompt, of retrieved documents, have most of their texts in common.
        self._tokens = replace(tokens, tokenize=lru_cache(_MOST_TEXTS)(tokens.tokenize))
        self._lock = threading.Lock()
        self._layouts: OrderedDict[str, SchemaLayout] = OrderedDict()
        self._loaded: dict[str, dict[str, Chunk]] = {}
        # Of each schema, for the id of each member of a union, where the KV of the others is.
        self._siblings: dict[str, dict[str, list[str]]] = {}

    @property
    def names(self) -> list[str]:
        """The names of the schemas that are loaded."""
        with self._lock:
            return sorted(self._loaded)

    def layout(self, schema: SchemaTree) -> SchemaLayout:
        """Return a schema in the tokens of this model, made once for each version of it.

        Raises
        ------
        PMLError
            If the model's chat template cannot be used with its messages.
        """
        with self._lock:
            known = self._layouts.get(schema.name)
            if known is not None and known.schema == schema:
                self._layouts.move_to_end(schema.name)
                return known
        made = SchemaLayout(schema, self._tokens)
        with self._lock:
            self._layouts[schema.name] = made
            self._layouts.move_to_end(schema.name)
            idle = [name for name in self._layouts if name not in self._loaded]
            for name in idle[: max(0, len(idle) - _MOST_LAYOUTS)]:
                del self._layouts[name]
        return made

    def load(self, schema: SchemaTree, ttl_s: float | None = None, *, prefetch: bool = True) -> LoadedSchema:
        """Encode what is not stored yet of a schema, name all of it, and forget what an earlier version had.

        Parameters
        ----------
        schema : SchemaTree
            The schema.
        ttl_s : float, optional
            Seconds that its KV lives.
        prefetch : bool
            Whether the members of its unions are brought into memory in the background, and what is served in parts.
        """
        layout = self.layout(schema)
        chunks = {part.name: self._chunk(schema.name, part, is_named=True) for part in layout.parts}
        done = self._ingest.add(chunks.values(), None, ttl_s) if chunks else AddResult(0, 0, 0, 0)
        removed = self._forget(schema.name, {chunk.id for chunk in chunks.values()})
        keys = {name: self._assembler.record(chunk).key for name, chunk in chunks.items()}
        siblings = {
            str(chunks[name].id): [keys[other] for other in union if other in keys and other != name]
            for union in schema.unions
            for name in union
            if name in chunks
        }
        with self._lock:
            self._loaded[schema.name], self._siblings[schema.name] = chunks, siblings
        if prefetch:
            members = {name for union in schema.unions for name in union}
            # What is served in parts does not rise to a faster tier on its way through a prompt.
            cut = {part.name for part in layout.parts if part.slots or not part.is_contiguous}
            self._prefetcher.begin(keys[name] for name in chunks if name in members | cut)
        tokens = sum(len(part) for part in layout.parts)
        return LoadedSchema(schema.name, len(chunks), tokens, done.encoded, done.unchanged, removed)

    def unload(self, name: str) -> int:
        """Forget a schema; return how many parts it had.

        Raises
        ------
        ConfigError
            If neither this engine nor its store knows it.
        """
        removed = self._forget(name, set())
        with self._lock:
            known = self._loaded.pop(name, None)
            self._siblings.pop(name, None)
            self._layouts.pop(name, None)
        if known is None and not removed:
            raise ConfigError(f"no schema {name!r} is loaded; there are {', '.join(self.names) or 'none'}")
        return removed

    def blend_prompt(self, prompt: Prompt) -> BlendPrompt:
        """Return a prompt of a schema as the engine serves it, loaded or not.

        Raises
        ------
        PMLError
            If its arguments or its new text do not fit.
        """
        schema = prompt.schema
        laid_out = lay_out(self.layout(schema), prompt)
        with self._lock:
            loaded = self._loaded.get(schema.name, {})
        chunks = [self._chunk_in(loaded, schema.name, part) for part in laid_out.parts]
        segments: list[Segment] = []
        positions: list[int] = []
        for position, segment in _segments(laid_out.segments, chunks):
            segments.append(segment)
            positions.append(position)
        return BlendPrompt(segments=segments, positions=positions)

    def read_ahead(self, used: Iterable[str | None]) -> None:
        """Bring into memory what the next prompt is likely to take: of each union the members beside the one that was used
        (Prompt Cache, section 3.2.3).

        Parameters
        ----------
        used : iterable of (str or None)
            The ids of the chunks of a prompt that was answered.
        """
        with self._lock:
            known = list(self._siblings.values())
        keys = [key for id in used if id is not None for siblings in known for key in siblings.get(id, ())]
        if keys:
            self._prefetcher.begin(keys)

    def _chunk_in(self, loaded: dict[str, Chunk], schema: str, part: Part) -> Chunk:
        known = loaded.get(part.name)
        if known is not None and (known.token_ids, known.positions) == (part.token_ids, part.positions):
            return known
        # It has no name to be deleted by, so it is kept in RAM only, unless it is stored as something else.
        return self._chunk(schema, part, is_named=False)

    def _chunk(self, schema: str, part: Part, *, is_named: bool) -> Chunk:
        label = f"{_prefix(schema)}{part.name}"
        return Chunk(label, label if is_named else None, token_ids=part.token_ids, positions=part.positions)

    def _forget(self, schema: str, kept: set[str | None]) -> int:
        namespace, prefix = self._assembler.namespace, _prefix(schema)
        stale = [name for name in self._store.names(namespace) if name.startswith(prefix) and name not in kept]
        return self._store.forget(namespace, stale) if stale else 0


def _prefix(schema: str) -> str:
    return f"{SCHEMA_PREFIX}{schema}/"


def _segments(placed: Sequence[PromptSegment], chunks: Sequence[Chunk]) -> Iterator[tuple[int, Segment]]:
    """The segments of a blended prompt, each with its position; whatever the prompt ends with, its last token is computed."""
    follows: list[int] = []
    for before, segment in zip((None, *placed), placed, strict=False):
        is_next = (
            before is not None
            and before.part is not None
            and (before.part, before.row + len(before), before.stop) == (segment.part, segment.row, segment.position)
        )
        follows.append((follows[-1] if follows else 0) + (not is_next))
    for _, run in groupby(zip(follows, placed, strict=True), key=lambda each: each[0]):
        parts = [segment for _, segment in run]
        first, last = parts[0], parts[-1]
        if first.part is None:
            yield first.position, first.token_ids
            continue
        is_end = last is placed[-1]
        start, stop = first.row, last.row + len(last) - is_end
        chunk = chunks[first.part]
        if stop > start:
            whole = (start, stop) == (0, len(chunk.token_ids or ()))
            yield first.position, chunk if whole else ChunkPart(chunk, start, stop)
        if is_end:
            yield last.stop - 1, last.token_ids[-1:]
