"""Schemas that an engine serves: their modules are chunks of its store, and their prompts become blended prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkPart, Segment
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddResult
from cacheblend_rag.engine.ingest import Ingest
from cacheblend_rag.engine.prefetch import Prefetcher
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.keys import SCHEMA_PREFIX
from cacheblend_rag.pml import Part, Prompt, Schema, SchemaLayout, Span, Tokens, lay_out
from cacheblend_rag.store import KVStore

__all__ = ["LoadedSchema", "Schemas"]

_MOST_LAYOUTS = 64
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
        Parts whose KV was computed, parts that were already stored under the same name, and parts that were forgotten because
        only an earlier version of the schema had them.
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
    """

    def __init__(self, assembler: Assembler, ingest: Ingest, store: KVStore, prefetcher: Prefetcher) -> None:
        self._assembler = assembler
        self._ingest = ingest
        self._store = store
        self._prefetcher = prefetcher
        tokens = Tokens.of(assembler.tokenizer)
        # Schemas that are made for one prompt, of retrieved documents, have most of their texts in common.
        self._tokens = replace(tokens, tokenize=lru_cache(_MOST_TEXTS)(tokens.tokenize))
        # By the names of the schemas, the least recently used first.
        self._layouts: dict[str, SchemaLayout] = {}
        # Of each loaded schema its chunks by the names of their parts, and the keys of each member of a union by their ids.
        self._loaded: dict[str, dict[str, Chunk]] = {}
        self._unions: dict[str, list[dict[str, str]]] = {}

    @property
    def names(self) -> list[str]:
        """The names of the schemas that are loaded."""
        return sorted(list(self._loaded))

    def layout(self, schema: Schema) -> SchemaLayout:
        """Return a schema in the tokens of this model, made once for each version of it.

        Raises
        ------
        PMLError
            If the model's chat template cannot be used with its messages.
        """
        layout = self._layouts.pop(schema.name, None)
        if layout is None or layout.schema != schema:
            layout = SchemaLayout(schema, self._tokens)
        self._layouts[schema.name] = layout
        for name in list(self._layouts)[:-_MOST_LAYOUTS]:
            self._layouts.pop(name, None)
        return layout

    def load(self, schema: Schema, ttl_s: float | None = None, *, prefetch: bool = True) -> LoadedSchema:
        """Encode what is not stored yet of a schema, name all of it, and forget what an earlier version had.

        Parameters
        ----------
        schema : Schema
            The schema.
        ttl_s : float, optional
            Seconds that its KV lives.
        prefetch : bool
            Whether the members of its unions are brought into memory in the background, and what is served in parts.
        """
        parts = self.layout(schema).parts
        chunks = {part.name: _chunk(schema.name, part, is_named=True) for part in parts}
        done = self._ingest.add(chunks.values(), ttl_s=ttl_s) if chunks else AddResult(0, 0, 0, 0)
        removed = self._forget(schema.name, {chunk.id for chunk in chunks.values()})
        keys = {name: self._assembler.record(chunk).key for name, chunk in chunks.items()}
        unions = [[name for name in union if name in chunks] for union in schema.unions]
        self._unions[schema.name] = [{str(chunks[name].id): keys[name] for name in union} for union in unions]
        self._loaded[schema.name] = chunks
        if prefetch:
            # What is served in parts does not rise to a faster tier on its way through a prompt.
            cut = [part.name for part in parts if part.slots or not part.is_contiguous]
            wanted = {name for names in (*unions, cut) for name in names}
            self._prefetcher.begin(keys[name] for name in chunks if name in wanted)
        tokens = sum(len(part.token_ids) for part in parts)
        return LoadedSchema(schema.name, len(chunks), tokens, done.encoded, done.unchanged, removed)

    def unload(self, name: str) -> int:
        """Forget a schema; return how many parts it had.

        Raises
        ------
        ConfigError
            If neither this engine nor its store knows it.
        """
        removed = self._forget(name, set())
        self._unions.pop(name, None)
        if self._loaded.pop(name, None) is None and not removed:
            raise ConfigError(f"no schema {name!r} is loaded; loaded schemas: {', '.join(self.names) or 'none'}")
        return removed

    def blend_prompt(self, prompt: Prompt) -> BlendPrompt:
        """Return a prompt of a schema as the engine serves it, loaded or not; whatever it ends with, its last token is computed.

        Raises
        ------
        PMLError
            If its arguments or its new text do not fit.
        """
        name = prompt.schema.name
        laid_out = lay_out(self.layout(prompt.schema), prompt)
        spans = _joined(laid_out.segments)
        last = spans[-1] if spans else None
        if last is not None and last.is_cached:
            spans[-1:] = [replace(last, token_ids=last.token_ids[:-1])] if len(last) > 1 else []
            spans.append(Span(last.token_ids[-1:], last.stop - 1))
        chunks = {key: self._chunk_of(name, part) for key, part in laid_out.parts.items()}
        segments: list[Segment] = []
        for span in spans:
            if span.part is None:
                segments.append(span.token_ids)
            else:
                chunk, is_whole = chunks[span.part], len(span) == len(laid_out.parts[span.part].token_ids)
                segments.append(chunk if is_whole else ChunkPart(chunk, span.row, span.row + len(span)))
        return BlendPrompt(segments=segments, positions=[span.position for span in spans])

    def read_ahead(self, used: Iterable[str | None]) -> None:
        """Bring into memory what the next prompt is likely to take: of each union the members beside the one that was used
        (Prompt Cache, section 3.2.3).

        Parameters
        ----------
        used : iterable of (str or None)
            The ids of the chunks of a prompt that was answered.
        """
        if self._unions:
            ids = set(used)
            unions = [union for unions in list(self._unions.values()) for union in unions if not ids.isdisjoint(union)]
            self._prefetcher.begin([key for union in unions for id, key in union.items() if id not in ids])

    def _chunk_of(self, schema: str, part: Part) -> Chunk:
        known = self._loaded.get(schema, {}).get(part.name)
        if known is not None and (known.token_ids, known.positions) == (part.token_ids, part.positions):
            return known
        # It has no name to be deleted by, so it is kept in RAM only, unless it is stored as something else.
        return _chunk(schema, part, is_named=False)

    def _forget(self, schema: str, kept: set[str | None]) -> int:
        namespace, prefix = self._assembler.namespace, f"{SCHEMA_PREFIX}{schema}/"
        stale = [name for name in self._store.names.ids(namespace) if name.startswith(prefix) and name not in kept]
        return self._store.forget(namespace, stale) if stale else 0


def _chunk(schema: str, part: Part, *, is_named: bool) -> Chunk:
    label = f"{SCHEMA_PREFIX}{schema}/{part.name}"
    return Chunk(label, label if is_named else None, token_ids=part.token_ids, positions=part.positions)


def _joined(segments: Iterable[Span]) -> list[Span]:
    """Segments with those put together that follow each other in a part as they do in the prompt."""
    joined: list[Span] = []
    for span in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.is_cached
            and (last.part, last.row + len(last), last.stop) == (span.part, span.row, span.position)
        ):
            joined[-1] = replace(last, token_ids=last.token_ids + span.token_ids)
        else:
            joined.append(span)
    return joined
