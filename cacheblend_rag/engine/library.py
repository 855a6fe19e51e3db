"""The chunks of one model and tenant: named, encoded, stored, found in prompts, deleted, wherever the model runs."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from cacheblend_rag.chunk import HEAD_PREFIX, BlendPrompt, Chunk, chunk_list, id_list, out_of_date
from cacheblend_rag.config import EngineConfig, Tuning
from cacheblend_rag.engine.answering import AnsweringStore, TenantStore
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.backend import EncodingModel
from cacheblend_rag.engine.ingest import AddJob, Ingest
from cacheblend_rag.engine.prefetch import Prefetch, Prefetcher
from cacheblend_rag.engine.protocol import AddOptions
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import ConfigError, PromptError, StoreError, StoreFormatError, StoreReadOnlyError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.metrics import EngineMetrics
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.prompt import AssembledPrompt
from cacheblend_rag.report import AddResult, WarmEstimate
from cacheblend_rag.store import KVStore, NameChanges, Names, NodeRecord, open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ChunkLibrary", "open_engine_store"]

logger = logging.getLogger(__name__)

Own = TypeVar("Own", bound="ChunkLibrary")


class ChunkLibrary(ABC):
    """The chunks of one model and one tenant in a store, and the prompts that are made of them.

    `BlendEngine` is the library of a model in this process, which answers as well; vLLM and Ray bring others.

    Attributes
    ----------
    namespace : str
        Digest of the model, tokenizer, preamble and tenant: libraries with the same one share KV.
    store : TenantStore
        What the tenant has in the store.
    metrics : EngineMetrics
        What was done, for Prometheus.
    unsupported_reason : str or None
        Why the model cannot be blended.
    is_shared : bool
        Whether vector stores of other processes fill it as well, as they do a server's.
    """

    unsupported_reason: str | None = None
    is_shared: bool = False
    _owns_store = False

    def __init__(self, model: EncodingModel, store: KVStore, config: EngineConfig, tuning: Tuning) -> None:
        self._process = os.getpid()
        self._check_model = model.check_model
        self.tokenizer, self.window, self._form = model.tokenizer, model.window, model.form
        self.config = config
        self._store = store
        self._answering = answering = AnsweringStore(store)
        self._identity = model.identity(private=store.is_private)
        self._assembler = Assembler(model, answering, self._identity, config)
        self.namespace: str = self._assembler.namespace
        self.store = TenantStore(store, config.tenant or "", self.namespace)
        self.metrics = EngineMetrics(self.store.stats, lambda: answering.failures)
        self._supply = KVSupply(model, answering, self._assembler, config.tenant or "")
        self._ingest = Ingest(self._assembler, self._supply, store, config)
        self._prefetcher = Prefetcher(answering, tuning.load_threads)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of a token as it is computed; 0 if the model cannot be blended."""
        return 0 if self._form is None else self._form.kv_bytes_per_token

    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: Literal[False] = False, **options: Unpack[AddOptions]
    ) -> AddResult: ...

    @overload
    def add(self, chunks: Iterable[Chunk], *, background: Literal[True], **options: Unpack[AddOptions]) -> AddJob: ...

    @overload
    def add(
        self, chunks: Iterable[Chunk], *, background: bool, **options: Unpack[AddOptions]
    ) -> AddResult | AddJob: ...

    def add(
        self,
        chunks: Iterable[Chunk],
        *,
        progress: Callable[[int, int], None] | None = None,
        on_refused: Callable[[Chunk, PromptError], None] | None = None,
        background: bool = False,
        whole: bool = False,
        gone: Sequence[str] = (),
    ) -> AddResult | AddJob:
        """Encode chunks and store their KV.

        The same id with the same text does nothing; with another text it replaces the chunk. All chunks are checked, and then all
        named, before the first is encoded; every stored batch is kept even if the process dies in the next one. If one cannot be
        served, none is added, unless `on_refused` is told of it. What cannot be encoded keeps its name, and the first such error
        is raised when all else is stored.

        In the background, the chunks are checked and named before this returns, and then encoded call by call, one
        batch whenever no prompt waits for the model. Until a chunk's turn comes it is a miss; if it is deleted or replaced
        before that, it is not encoded.

        Each chunk is encoded twice: right behind the preamble, which serves the first chunk of a prompt, and behind a companion
        (`EngineConfig.companions`) and the end of what precedes it in its document (`Chunk.document`), which serves the others.
        The pieces of a document may come in any order if their places are given, and in several calls; those that are there keep
        their companions. An id that is added again with another document or place is deleted there and added here.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks; if several have the same id, the last counts.
        progress : callable, optional
            Called with the numbers of finished and of all chunks after each batch; by the background thread if `background`.
        on_refused : callable, optional
            Called with each chunk that cannot be served or encoded, and why, instead of the error being raised. What cannot be
            served is left out, and what its id stood for is deleted.
        background : bool
            Whether to return before the chunks are encoded.
        whole : bool
            Whether the chunks are all that their documents have: what else stands there is deleted in the same step in which
            they are named, so that everybody finds the document as it was or as it is now.
        gone : sequence of str
            Other ids, which are deleted; where their chunks come again under these ids, KV that is stored stays.

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
        PromptError
            If a chunk has a token that the model has no embedding of.
        ConfigError
            If a chunk has no id.
        StoreError
            If the KV cannot be stored; what was stored until then stays. For chunks added in the background, the job's `result`
            and `flush` raise it.
        """
        self._check_open()
        self._check_model()
        return self._ingest.add(chunk_list(chunks), progress, on_refused, background, whole, gone)

    def flush(self) -> None:
        """Wait until what was added in the background, and the KV of all misses so far, is stored.

        Raises
        ------
        CacheBlendError
            The first error in the background since the last flush.
        """
        self._check_open()
        self._ingest.jobs.flush()
        self._store.flush()

    def estimate(self, chunks: Iterable[Chunk]) -> WarmEstimate:
        """Estimate what `add` would cost, by encoding a few of the new chunks, for a few seconds; nothing is stored.

        Chunks that cannot be served are left out.

        Parameters
        ----------
        chunks : iterable of Chunk
            The chunks.

        Returns
        -------
        WarmEstimate
            What is not stored yet: its `chunks` and `tokens`, and what they would take, `ram_bytes`, `disk_bytes` and `seconds`.
        """
        self._check_open()
        return self._ingest.estimate(chunk_list(chunks))

    def delete(self, ids: Iterable[str]) -> int:
        """Forget chunks: their names at once, and their KV unless another name has the same text.

        All KV that was read behind them is dropped too, and computed again behind others when it is needed or added.

        Parameters
        ----------
        ids : iterable of str
            The chunks.

        Returns
        -------
        int
            How many of the ids were known.
        """
        self._check_open()
        return self._store.forget(self.namespace, id_list(ids))

    def delete_document(self, document: str) -> int:
        """Forget all chunks of a document in one step; return how many there were."""
        return self.delete(self.document(document))

    def sync(self, present_ids: Iterable[str]) -> int:
        """Forget all chunks but these, and parts of schemas; return how many there were.

        Parameters
        ----------
        present_ids : iterable of str
            The ids that are to stay: those of all vector stores over this engine, in all processes, and what else was added.
        """
        return self.delete(out_of_date(self.ids(), present_ids))

    def document(self, document: str) -> list[str]:
        """Return the ids of a document's chunks in the order in which they are read; none if it is unknown."""
        return self._names.document(self.namespace, document)

    def prefetch(self, ids: Iterable[str]) -> Prefetch:
        """Begin to read the KV of chunks that are likely to be needed soon, and return at once.

        While a reranker works on what was retrieved, for example, their KV comes from disk and remote tiers into RAM, and onto
        the device, as far as these have room. A prompt that comes in the meantime waits for those of its chunks that are being
        read, and reads the others itself.

        Parameters
        ----------
        ids : iterable of str
            The chunks, most likely ones first; those that are not known are left out.

        Returns
        -------
        Prefetch
            Can be waited for; it need not be kept.
        """
        self._check_open()
        records = [each for each in self._answering.lookup(self.namespace, id_list(ids)) or [] if each is not None]
        # As a prompt has them: the first right behind its head, and the others behind that.
        return self._prefetcher.begin(each.keys[-1] if number else each.key for number, each in enumerate(records))

    def contains(self, id: str) -> bool:
        """Whether a chunk of this id is known; its KV may be evicted, and is then computed again when it is needed."""
        return self.records([id]) != [None]

    def ids(self, within: str | None = None) -> list[str]:
        """Return the ids of all known chunks of this model, without heads of prompts.

        Parameters
        ----------
        within : str, optional
            Return only those of documents whose names begin so.
        """
        return [id for id in self._names.ids(self.namespace, within) if not id.startswith(HEAD_PREFIX)]

    def page(self, after: str = "", limit: int = 1000) -> list[tuple[str, str | None]]:
        """Return the first ids behind `after`, sorted, and the document of each chunk; a large library is listed page by page."""
        return self._names.page(self.namespace, after, limit, HEAD_PREFIX)

    def documents(self, after: str = "", limit: int = 1000) -> list[str]:
        """Return the first known documents behind the one called `after`, sorted by their names."""
        return self._names.documents(self.namespace, after, limit)

    def heads(self) -> list[str]:
        """Return the names under which the KV of prompts' fixed heads (`FixedText`) is kept; `delete` takes them."""
        return self._names.beginning(self.namespace, HEAD_PREFIX)

    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return what is known of each id: its tokens, its document, what its KV has seen; None where the id is unknown."""
        return self._names.lookup(self.namespace, id_list(ids))

    def changes(self, since: int | None = None) -> NameChanges:
        """Return which chunks are known, or which of them were added, replaced or deleted since an earlier call.

        Parameters
        ----------
        since : int, optional
            The `mark` of the earlier call; by default, and if that was ten thousand changes ago, all chunks are returned.

        Returns
        -------
        NameChanges
            The names, without those that `ids` leaves out.
        """
        changes = self._names.changes(self.namespace, since)
        names = [each for each in changes.names if each[1] is None or not each[1].startswith(HEAD_PREFIX)]
        return replace(changes, names=names)

    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout:
        """Return where the chunks of `prompt` are among its tokens."""
        self._check_open()
        return self._assembler.assemble(prompt).layout

    def prompt_ids(self, prompt: BlendPrompt) -> tuple[int, ...]:
        """Return the token ids that the model is given for `prompt`."""
        return self.prompt_layout(prompt).token_ids

    def look_up(self, prompt: BlendPrompt) -> tuple[AssembledPrompt, frozenset[str]]:
        """Return a prompt in tokens, and the keys of its head and chunks whose KV is on disk, for servers that read it there.

        A new head (the tokens before the first chunk) is encoded now, missing chunks that have a name in the background.
        """
        self._check_open()
        assembled = self._assembler.assemble(prompt)
        if self._form is None or not self._form.is_movable:
            return assembled, frozenset()
        keys = {chunk.key: chunk.id if chunk.named else None for chunk in assembled.chunks}
        if assembled.leading_ids:
            keys[self._supply.store_head(assembled.leading_ids)] = None
        held = frozenset(
            key for key, is_held in zip(keys, self._store.holds(list(keys), durable=True), strict=True) if is_held
        )
        missing = [id for key, id in keys.items() if id is not None and key not in held]
        if missing:
            self._ingest.encode_later(missing)
        return assembled, held

    def __repr__(self) -> str:
        tenant = f"tenant={self.config.tenant!r}, " if self.config.tenant else ""
        return f"{type(self).__name__}({getattr(self, 'model_name', '')!r}, {tenant}store={self._store!r})"

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(wait=error is None)

    @abstractmethod
    def for_tenant(self, tenant: str) -> ChunkLibrary:
        """Return the chunks of another tenant in the same store; close them before these."""

    def close(self, *, wait: bool = True) -> None:
        """Write what waits to be written and close the store, unless the store was passed in.

        A running computation ends first; calls that wait for it fail. What is attached is detached.

        Nothing is lost once `add` has returned: a chunk that is not encoded yet keeps its name, and is a miss. Failures in the
        background are logged meanwhile; call `flush` first to have them raised.

        Parameters
        ----------
        wait : bool
            Whether chunks that were added in the background are encoded first, as at the end of a ``with`` block; a block that
            ends with an error does not wait.
        """
        self._prefetcher.close()
        self._ingest.jobs.close(wait)
        with self._supply.scheduler:
            if not self._supply.is_closed:
                self._supply.is_closed = True
                if self._owns_store:
                    self._store.close()
                else:
                    self._store.settle()

    @property
    def _names(self) -> Names:
        self._check_open()
        return self._store.names

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ConfigError("this engine was made before its process was forked; make one in each process")
        if self._supply.is_closed:
            raise ConfigError("this engine is closed; make a new one")


def open_engine_store(
    store: KVStore | str | Path | None, config: EngineConfig, tuning: Tuning, form: Decoder | ModelCard | None
) -> KVStore:
    """Open a store with tiers of the sizes and codecs that the settings name; one that is open already is returned."""
    if isinstance(store, KVStore):
        return store
    if not isinstance(store, str | Path | None):
        raise ConfigError(
            f"store is a {type(store).__name__}; give a folder, or what open_store returned, which several engines may share"
        )
    by_default = form is not None and any(device.type == "cuda" for device in form.devices)
    settings: dict[str, Any] = {
        "page_locked": by_default if tuning.page_locked is None else tuning.page_locked,
        "ram_bytes": config.ram_bytes,
        "disk_bytes": config.disk_bytes,
        "ram_codec": config.ram_codec,
        "disk_codec": config.disk_codec,
        "remote": None if config.remote is None else config.remote.get_secret_value(),
        "names": config.names_url,
    }
    try:
        return open_store(store, **settings)
    except StoreError as error:
        # Another folder was meant; or it is RAM that fails.
        if store is None or isinstance(error, StoreFormatError | StoreReadOnlyError):
            raise
        logger.warning(
            "the store cannot be opened, so KV is kept in the memory of this process and is lost with it: %s", error
        )
        return open_store(None, **settings)
