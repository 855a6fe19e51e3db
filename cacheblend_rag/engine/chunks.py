"""The part of an engine that is there before any prompt: a model, its settings, its store, and the chunks kept there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from transformers import PreTrainedModel

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddJob, AddResult
from cacheblend_rag.engine.identity import engine_identity
from cacheblend_rag.engine.ingest import Ingest, WarmEstimate
from cacheblend_rag.engine.kept import KeptTurns
from cacheblend_rag.engine.markup import SCHEMA_PREFIX, LoadedSchema, Schemas
from cacheblend_rag.engine.opening import look_at_model, open_engine_store
from cacheblend_rag.engine.prefetch import Prefetch, Prefetcher
from cacheblend_rag.engine.settings import CallSettings
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.engine.uses import FirstUses
from cacheblend_rag.errors import ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.keys import HEAD_PREFIX
from cacheblend_rag.model import Capability, WeightsWatch, capability, model_window
from cacheblend_rag.pml.nodes import SchemaTree
from cacheblend_rag.store import KVStore, NameChanges, NodeRecord

__all__ = ["ChunkEngine"]


class ChunkEngine:
    """Keeps chunks for one model: their names, and their KV. `BlendEngine`, which answers prompts made of them, is one.

    What it is made with, and the errors of that, are those of `BlendEngine`.

    Attributes
    ----------
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    unsupported_reason : str or None
        Why it cannot.
    schemas : Schemas
        The schemas that are loaded, and how their prompts are laid out.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        config: BlendConfig | None = None,
        store: KVStore | str | Path | None = None,
        namespace: str | None = None,
    ) -> None:
        config = BlendConfig.of(config)
        self.config = config if namespace is None else config.replace(namespace=namespace)
        self.model = model.eval()
        self.model_name: str = getattr(model, "name_or_path", "") or type(model).__name__
        self.tokenizer = tokenizer
        self._closed = False
        self.decoder, self.unsupported_reason = look_at_model(self.model, self.config)
        self._call_settings = CallSettings(self.config, self.model, self.decoder)
        self._owns_store = store is None or isinstance(store, str | Path)
        self.store: KVStore = (
            open_engine_store(store, self.config, self.decoder)
            if store is None or isinstance(store, str | Path)
            else store
        )
        with ExitStack() as undo:
            if self._owns_store:
                # Nobody could close it if the rest fails.
                undo.callback(self.store.close)
            self._weights = WeightsWatch(self.model)
            identity = engine_identity(model, tokenizer, private=self.store.is_private)
            defers = self.config.encode_on == "second_use"
            self._assembler = Assembler(
                tokenizer,
                self.store,
                identity,
                self.config.encoding_prefix,
                model_window(model),
                self.config.namespace,
                FirstUses(self.store) if defers and self.decoder is not None else None,
                self.decoder is None or self.decoder.is_movable,
                self.config.separator,
                0 if self.config.context == "none" or self.decoder is None else self.config.context_tokens,
                None if self.decoder is None else self.decoder.rope_reach,
            )
            self._supply = KVSupply(model, self.decoder, self.store, self._assembler, self.config)
            self._ingest = Ingest(self._assembler, self._supply, self.store, self.decoder, self.config)
            self._supply.on_late = self._ingest.encode_later
            self._kept = KeptTurns(self.store, self._assembler.namespace, self.config.conversation_bytes)
            self._prefetcher = Prefetcher(self.store, self.config.load_threads)
            self.schemas = Schemas(self._assembler, self._ingest, self.store, self._prefetcher)
            undo.pop_all()

    def close(self, *, wait: bool = True) -> None:
        """Write what waits to be written and close the store, unless it was handed in; see `BlendEngine.close`."""
        self._prefetcher.close()
        self._ingest.close(wait)
        with self._supply.lock:
            if not self._closed:
                self._closed = True
                self._kept.close()
                if self._owns_store:
                    self.store.close()
                else:
                    self.store.settle()

    def check_config(self, config: BlendConfig) -> BlendConfig:
        """Return settings as a call that is given them uses them.

        Parameters
        ----------
        config : BlendConfig
            Settings for some calls, as `generate` takes them.

        Returns
        -------
        BlendConfig
            The same, but for what this engine has settled of its own.

        Raises
        ------
        ConfigError
            If they name a selector or a layer that does not exist, ask of the model what it does not have, or change what was
            settled when the engine was made.
        """
        return self._call_settings.for_call(config)

    @staticmethod
    def is_settled(name: str) -> bool:
        """Return whether the setting of this name is settled when an engine is made, so that no single call can change it."""
        return CallSettings.is_settled(name)

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        background: Literal[False] = ...,
    ) -> AddResult: ...

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        background: Literal[True],
    ) -> AddJob: ...

    @overload
    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = ...,
        ttl_s: float | None = ...,
        background: bool,
    ) -> AddResult | AddJob: ...

    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = None,
        ttl_s: float | None = None,
        background: bool = False,
    ) -> AddResult | AddJob:
        """Encode chunks and store their KV.

        The same id with the same text does nothing; with another text it replaces the chunk. All chunks are checked
        before the first is encoded, and every stored batch is kept even if the process dies in the next one.

        In the background, the chunks are checked and named before this returns, and then encoded one call's after the other's, a
        batch whenever no prompt waits for the model. Until a chunk's turn comes it is a miss; if it is deleted or replaced
        before, it is not encoded. With ``encode_on="second_use"`` chunks are only named.

        A chunk that is a piece of a document (`Chunk.document`) is put into it, and encoded behind the chunks before it there.
        What it displaces, because it now stands behind other text, is encoded anew in the same call. The pieces of a document may
        come in any order where their places are given, and in several calls. An id that is added again with another document or
        place is deleted there and added here.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks; of several with one id the last counts.
        progress : callable, optional
            Called with the number of finished chunks and of all, after each batch; by the background thread if `background`.
        ttl_s : float, optional
            Seconds that their KV lives, instead of ``config.ttl_s``. Adding a chunk again makes it live that long from then on,
            if that is longer than it would have lived.
        background : bool
            Whether to return before the chunks are encoded.

        Returns
        -------
        AddResult or AddJob
            What was done; in the background, a job that will say.

        Raises
        ------
        EmptyChunkError
            If a chunk's text has no tokens.
        PromptTooLongError
            If a chunk does not fit the model's window.
        ConfigError
            If `ttl_s` is no positive number.
        StoreError
            If the KV cannot be stored; what was stored until then stays. Of chunks added in the background, the job's `result`
            raises it, and `flush`.
        """
        self._check_open()
        self._weights.check()
        if ttl_s is not None and not (isinstance(ttl_s, int | float) and 0 < ttl_s < math.inf):
            raise ConfigError(
                f"ttl_s={ttl_s!r} must be a positive number of seconds; leave it out to keep chunks for ever"
            )
        if not isinstance(chunks, Chunk):
            chunks = list(chunks)
            for chunk in chunks:
                prefix = _reserved(chunk.id or "") if isinstance(chunk, Chunk) else None
                if prefix is not None:
                    what = "schemas" if prefix == SCHEMA_PREFIX else "prompts' heads"
                    raise ConfigError(
                        f"the id {chunk.id!r} begins with {prefix!r}, as those of {what} do; give the chunk another one"
                    )
        if background:
            return self._ingest.add_later(chunks, progress, ttl_s)
        return self._ingest.add(chunks, progress, ttl_s)

    def flush(self) -> None:
        """Wait until what was added in the background, and the KV of all misses so far, is stored.

        Raises
        ------
        CacheBlendError
            The first error in the background since the last flush.
        """
        self._check_open()
        self._ingest.flush()
        self.store.flush()

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Say what `add` would cost, encoding the longest new chunk once to take the time and storing nothing.

        With ``encode_on="second_use"`` that is nothing.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks.

        Returns
        -------
        WarmEstimate
            What is not stored yet, in chunks, tokens, bytes of KV as `disk_codec` packs it, and seconds.
        """
        self._check_open()
        return self._ingest.estimate(chunks)

    def refusals(self, chunks: Iterable[Chunk]) -> list[PromptError | None]:
        """Say of each chunk what `add` would raise because of it, or None; nothing is stored.

        Returns
        -------
        list of PromptError or None
            An `EmptyChunkError` for a text without tokens, a `PromptTooLongError` for one beyond the model's window.
        """
        self._check_open()
        return [self._assembler.refusal(chunk) for chunk in chunks]

    def delete(self, ids: Iterable[str]) -> int:
        """Forget chunks: their names at once, and their KV unless another name has the same text behind the same text.

        What stood behind them in their documents knows of them: its KV is gone too, and computed again, without them, when it is
        asked for or added. Conversations forget what may know of them.

        Returns
        -------
        int
            How many of the ids were known.
        """
        self._check_open()
        gone = _id_list(ids)
        known = self.store.forget(self._assembler.namespace, gone)
        self._kept.refresh()
        return known

    def delete_document(self, document: str) -> int:
        """Forget all chunks of a document in one step; return how many there were."""
        return self.delete(self.document(document))

    def document(self, document: str) -> list[str]:
        """Return the ids of a document's chunks in the order in which they are read; none where it is unknown."""
        self._check_open()
        return self.store.document(self._assembler.namespace, document)

    def places(self, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each chunk is a piece of; None where it is encoded alone, or unknown."""
        self._check_open()
        return self.store.documents(self._assembler.namespace, _id_list(ids))

    def prefetch(self, ids: Iterable[str]) -> Prefetch:
        """Begin to read the KV of chunks that are likely to be asked for soon, and return at once.

        While a reranker works on what was retrieved, for example, their KV comes from disk and remote tiers to RAM, and to the
        device, as far as these have room. A prompt that comes meanwhile waits for those of its chunks that are being read, and
        reads the others itself.

        Parameters
        ----------
        ids : iterable of str
            The chunks, most likely ones first; those that are not known are left out.

        Returns
        -------
        Prefetch
            To wait for, or to cancel; it need not be kept.
        """
        self._check_open()
        records = self.store.lookup(self._assembler.namespace, _id_list(ids))
        return self._prefetcher.begin(record.key for record in records if record is not None)

    def pin(self, ids: Iterable[str]) -> None:
        """Keep the KV of these chunks: it is never evicted, now or when it is computed again, and counts against the budget.

        Raises
        ------
        UnknownChunkError
            If an id is unknown; nothing is pinned then.
        StoreFullError
            If more would be pinned than `disk_bytes`.
        """
        self._check_open()
        self.store.pin(self._assembler.namespace, _id_list(ids))

    def unpin(self, ids: Iterable[str]) -> None:
        """Let the KV of these chunks be evicted again.

        Raises
        ------
        UnknownChunkError
            If an id is unknown; nothing is unpinned then.
        """
        self._check_open()
        self.store.unpin(self._assembler.namespace, _id_list(ids))

    def contains(self, id: str) -> bool:
        """Whether a chunk of this id is known; its KV may be evicted, and is then computed again when it is needed."""
        self._check_open()
        return self.store.lookup(self._assembler.namespace, [id])[0] is not None

    def ids(self) -> list[str]:
        """Return the ids of all known chunks of this model, parts of loaded schemas and heads of prompts not among them."""
        self._check_open()
        return [id for id in self.store.names(self._assembler.namespace) if _reserved(id) is None]

    def heads(self) -> list[str]:
        """Return the names under which the KV of prompts' fixed heads (`FixedText`) is kept; `delete` takes them."""
        self._check_open()
        return [id for id in self.store.names(self._assembler.namespace) if _reserved(id) == HEAD_PREFIX]

    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return what is known of each id: its tokens and the digest of its text; None where the id is unknown."""
        self._check_open()
        return self.store.lookup(self._assembler.namespace, _id_list(ids))

    @property
    def revision(self) -> int:
        """A number that every added, replaced or deleted chunk raises, by whatever process; equal numbers: no change."""
        self._check_open()
        return self.store.revision()

    def changes(self, since: int | None = None) -> NameChanges:
        """Return which chunks are known, or which of them were added, replaced or deleted since an earlier call.

        Parameters
        ----------
        since : int, optional
            The `mark` of the earlier call; by default, and if that was ten thousand changes ago, all chunks are returned.

        Returns
        -------
        NameChanges
            The names, those that `ids` leaves out not among them.
        """
        self._check_open()
        changes = self.store.changes(self._assembler.namespace, since)
        names = [each for each in changes.names if each[1] is None or _reserved(each[1]) is None]
        waiting = {id: digest for id, digest in changes.waiting.items() if _reserved(id) is None}
        return replace(changes, names=names, waiting=waiting)

    def capability(self) -> Capability:
        """Return what each layer of the model is like, what blending does there, and why not where it does not."""
        return capability(self.model, self.decoder, self.unsupported_reason)

    @property
    def namespace(self) -> str:
        """Digest of the model, tokenizer, encoding prefix and tenant (`config.namespace`): equal ones share KV."""
        return self._assembler.namespace

    @property
    def window(self) -> int | None:
        """Most tokens that the model can read and write, or None if its configuration does not say."""
        return model_window(self.model)

    def load_schema(self, schema: SchemaTree, *, ttl_s: float | None = None) -> LoadedSchema:
        """Encode the modules of a schema and keep them (Prompt Cache, section 3.3).

        A schema of the same name is replaced: what has not changed is not encoded again, and what is gone is forgotten. Its
        prompts can be asked without loading it as well; modules are then misses, kept in RAM.

        Parameters
        ----------
        schema : Schema
            The schema.
        ttl_s : float, optional
            Seconds that its KV lives, instead of ``config.ttl_s``.

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
        self._check_open()
        if self.decoder is not None and not self.decoder.is_placeable:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} counts its tokens and takes no positions, so it cannot serve schemas"
            )
        return self.schemas.load(schema, ttl_s)

    def unload_schema(self, name: str) -> int:
        """Forget a schema and the KV that only it had; return how many of its modules and texts were stored.

        Raises
        ------
        ConfigError
            If no schema of that name is known.
        """
        self._check_open()
        return self.schemas.unload(name)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")


def _reserved(id: str) -> str | None:
    """Return what an id begins with that no chunk's may."""
    return next((prefix for prefix in (SCHEMA_PREFIX, HEAD_PREFIX) if id.startswith(prefix)), None)


def _id_list(ids: Iterable[str]) -> list[str]:
    if isinstance(ids, str):
        raise ConfigError(f"ids is the string {ids[:40]!r}; give a list of ids")
    return list(ids)
