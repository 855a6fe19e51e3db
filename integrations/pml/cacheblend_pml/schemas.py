"""Schemas that an engine serves: their modules are chunks of its store, and their prompts become blended prompts."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cacheblend_pml.chat import Tokens
from cacheblend_pml.layout import Part, SchemaLayout, Span, lay_out
from cacheblend_pml.schema import Prompt, Schema
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkPart, Segment
from cacheblend_rag.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from cacheblend_rag.engine import BlendEngine, Engine

__all__ = ["LoadedSchema", "Schemas"]

_PREFIX = "pml/"
_MOST_LAYOUTS = 64
_MOST_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class LoadedSchema:
    """Result of loading a schema: its parts (what is encoded apart: modules, anonymous texts, scaffolds) and their tokens.

    Parts `encoded` had no KV, those `unchanged` were stored under the same name; `removed` are those of an earlier version.
    """

    name: str
    parts: int
    tokens: int
    encoded: int
    unchanged: int
    removed: int


@dataclass(frozen=True)
class _Known:
    """Knowledge of the schemas of one engine, which it does not keep alive.

    `layouts` are by the names of the schemas, the least recently used first; `loaded` are the chunks of each loaded schema by the
    names of their parts.
    """

    tokens: Tokens
    layouts: dict[str, SchemaLayout] = field(default_factory=dict)
    loaded: dict[str, dict[str, Chunk]] = field(default_factory=dict)


_known: WeakKeyDictionary[BlendEngine, _Known] = WeakKeyDictionary()
_known_lock = threading.Lock()


class Schemas:
    """The schemas of one engine. However often this is made of an engine, it knows what is loaded there.

    A part of a schema is an ordinary chunk. Its id, ``pml/<schema>/<part>``, is its name while the schema is loaded; its key is
    made of its tokens and the gaps between them, and of its position only where the model's positions are learned. So a module
    that moves because another has grown keeps its KV, and a module that is a stored document has it already.

    Parameters
    ----------
    engine : BlendEngine
        The engine.

    Raises
    ------
    ConfigError
        If the engine is not in this process.
    """

    def __init__(self, engine: Engine) -> None:
        # Only now: schemas are read and checked without the model libraries.
        from cacheblend_rag.engine import BlendEngine

        if not isinstance(engine, BlendEngine):
            raise ConfigError(
                f"schemas are known to an engine of this process only, and a {type(engine).__name__} is none; use a BlendEngine, "
                "or put the texts as chunks"
            )
        self._engine = engine
        with _known_lock:
            if engine not in _known:
                tokens = Tokens.of(engine.tokenizer)
                # Schemas that are made for one prompt, of retrieved documents, have most of their texts in common.
                _known[engine] = _Known(replace(tokens, tokenize=lru_cache(_MOST_TEXTS)(tokens.tokenize)))
            self._known = _known[engine]

    @property
    def names(self) -> list[str]:
        """The names of the schemas that are loaded."""
        return sorted(list(self._known.loaded))

    def layout(self, schema: Schema) -> SchemaLayout:
        """Return a schema in the tokens of this model, made once for each version of it."""
        layouts = self._known.layouts
        layout = layouts.pop(schema.name, None)
        if layout is None or layout.schema != schema:
            layout = SchemaLayout(schema, self._known.tokens)
        layouts[schema.name] = layout
        for name in list(layouts)[:-_MOST_LAYOUTS]:
            layouts.pop(name, None)
        return layout

    def load(self, schema: Schema) -> LoadedSchema:
        """Encode the modules of a schema and keep them (Prompt Cache, section 3.3).

        A schema of the same name is replaced: what has not changed is not encoded again, and what is gone is forgotten. Its
        prompts can also be used without loading it; modules are then misses, kept in RAM.

        Parameters
        ----------
        schema : Schema
            The schema.

        Returns
        -------
        LoadedSchema
            What was done.

        Raises
        ------
        PMLError
            If the model's chat template cannot be used with the schema's messages.
        PromptTooLongError
            If a module does not fit the model's window, or reaches beyond it where positions are learned.
        UnsupportedModelError
            If the model takes no positions.
        StoreError
            If KV cannot be stored.
        """
        engine = self._engine
        if engine.decoder is not None and not engine.decoder.takes_positions:
            raise UnsupportedModelError(
                f"{type(engine.model).__name__} counts its tokens and takes no positions, so it cannot serve schemas"
            )
        parts = self.layout(schema).parts
        chunks = {part.name: _chunk(schema.name, part, is_named=True) for part in parts}
        done = engine.add(chunks.values())
        removed = self._forget(schema.name, chunks)
        self._known.loaded[schema.name] = chunks
        members = {name for union in schema.unions for name in union}
        # What is served in parts does not rise to a faster tier on its way through a prompt.
        early = [part.name for part in parts if part.name in members or part.slots or not part.is_contiguous]
        engine.prefetch(_id(schema.name, name) for name in early)
        tokens = sum(len(part.token_ids) for part in parts)
        return LoadedSchema(schema.name, len(chunks), tokens, done.encoded, done.unchanged, removed)

    def unload(self, name: str) -> int:
        """Forget a schema and the KV that only it had; return how many of its parts were stored.

        Raises
        ------
        ConfigError
            If neither this engine nor its store knows it.
        """
        removed = self._forget(name, ())
        if self._known.loaded.pop(name, None) is None and not removed:
            raise ConfigError(f"no schema {name!r} is loaded; loaded schemas: {', '.join(self.names) or 'none'}")
        return removed

    def prompt(self, prompt: Prompt) -> BlendPrompt:
        """Return a prompt of a schema as the engine takes it, loaded or not; whatever it ends with, its last token is computed.

        What the next prompt is likely to take is brought into memory in the background: of each union the members beside the one
        that is used (Prompt Cache, section 3.2.3).

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
        loaded = self._known.loaded.get(name, {})
        chunks = {key: _chunk_of(loaded, name, part) for key, part in laid_out.parts.items()}
        segments: list[Segment] = []
        for span in spans:
            if span.part is None:
                segments.append(span.token_ids)
            else:
                chunk, is_whole = chunks[span.part], len(span) == len(laid_out.parts[span.part].token_ids)
                segments.append(chunk if is_whole else ChunkPart(chunk, span.row, span.row + len(span)))
        used = prompt.imports.keys()
        unions = [union for union in prompt.schema.unions if not used.isdisjoint(union)]
        beside = [member for union in unions for member in union if member in loaded and member not in used]
        if beside:
            self._engine.prefetch(_id(name, member) for member in beside)
        return BlendPrompt(segments=segments, positions=[span.position for span in spans])

    def _forget(self, schema: str, kept: Collection[str]) -> int:
        prefix = _id(schema, "")
        names = [id.removeprefix(prefix) for id in self._engine.ids() if id.startswith(prefix)]
        return self._engine.delete(_id(schema, name) for name in names if name not in kept)


def _id(schema: str, part: str) -> str:
    return f"{_PREFIX}{schema}/{part}"


def _chunk(schema: str, part: Part, *, is_named: bool) -> Chunk:
    label = _id(schema, part.name)
    return Chunk(label, label if is_named else None, token_ids=part.token_ids, positions=part.positions)


def _chunk_of(loaded: dict[str, Chunk], schema: str, part: Part) -> Chunk:
    known = loaded.get(part.name)
    if known is not None and (known.token_ids, known.positions) == (part.token_ids, part.positions):
        return known
    # It has no name to be deleted by, so it is kept in RAM only, unless it is stored as something else.
    return _chunk(schema, part, is_named=False)


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
