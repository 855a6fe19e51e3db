"""The chunks of one model and tenant: named, encoded, stored, found in prompts, deleted; whoever computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine.answering import AnsweringStore
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.background import AddJob, AddResult
from cacheblend_rag.engine.collection import ChunkCollection
from cacheblend_rag.engine.cost import WarmEstimate
from cacheblend_rag.engine.ingest import Ingest
from cacheblend_rag.engine.interface import AnyLibrary, id_list
from cacheblend_rag.engine.metrics import EngineMetrics
from cacheblend_rag.engine.prefetch import Prefetch, Prefetcher
from cacheblend_rag.engine.prefix import StoredPrefix, prompt_head, stored_prefix
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.engine.tenant import TenantStore
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.keys import HEAD_PREFIX
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, ModelCard
from cacheblend_rag.store import NameChanges, NodeRecord
from cacheblend_rag.tuning import Tuning

__all__ = ["ChunkLibrary"]

Own = TypeVar("Own", bound="ChunkLibrary")


class ChunkLibrary(AnyLibrary):
    """The chunks of one model and one tenant in a store, and the prompts that are made of them.

    `BlendEngine` is the library of a model in this process, which answers as well.

    Parameters
    ----------
    tokenizer : Any
        The model's tokenizer.
    form : Decoder, ModelCard or None
        What is known of the model's KV; None if it cannot be blended.
    answering : AnsweringStore
        The store, as answers ask it.
    assembler : Assembler
        Puts prompts into tokens.
    supply : KVSupply
        Computes KV.
    config : EngineConfig
        The settings.
    tuning : Tuning
        How many threads read ahead.

    Attributes
    ----------
    namespace : str
        Digest of the model, tokenizer, preamble and tenant: libraries with the same one share KV.
    store : TenantStore
        What the tenant has in the store.
    metrics : EngineMetrics
        What was done, for Prometheus.
    window : int or None
        Maximum tokens that the model can read and write; None if its configuration does not say.
    unsupported_reason : str or None
        Why the model cannot be blended.
    """

    metrics: EngineMetrics
    window: int | None
    unsupported_reason: str | None = None

    def __init__(
        self,
        tokenizer: Any,
        form: Decoder | ModelCard | None,
        answering: AnsweringStore,
        assembler: Assembler,
        supply: KVSupply,
        config: EngineConfig,
        tuning: Tuning,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._form = form
        self._answering = answering
        self._store = answering.store
        self._assembler = assembler
        self.namespace = assembler.namespace
        self.store = TenantStore(self._store, config.tenant or "", self.namespace)
        self._supply = supply
        self._ingest = Ingest(assembler, supply, self._store, form, config)
        supply.on_late = self._ingest.encode_later
        self._prefetcher = Prefetcher(answering, tuning.threads)
        self._closed = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of a token as it is computed; 0 if the model cannot be blended."""
        return 0 if self._form is None else self._form.kv_bytes_per_token

    def _add(
        self,
        chunks: list[Chunk],
        progress: Callable[[int, int], None] | None,
        ttl_s: float | None,
        on_refused: Callable[[Chunk, PromptError], None] | None,
        background: bool,
        whole: bool,
    ) -> AddResult | AddJob:
        self._check_open()
        self._check_model()
        add = self._ingest.add_later if background else self._ingest.add
        return add(chunks, progress, ttl_s, on_refused, whole)

    def flush(self) -> None:
        self._check_open()
        self._ingest.jobs.flush()
        self._store.flush()

    def _estimate(self, chunks: list[Chunk]) -> WarmEstimate:
        self._check_open()
        return self._ingest.estimate(chunks)

    def _delete(self, ids: list[str], owner: str, sources: list[str]) -> int:
        self._check_open()
        return self._store.forget(self.namespace, ids, owner, sources)

    def collection(
        self, name: str | None, is_known: bool, present: Callable[[Sequence[str]], Collection[str] | None]
    ) -> ChunkCollection:
        self._check_open()
        return ChunkCollection(self._store, self.namespace, self.delete, name, is_known, present)

    def document(self, document: str) -> list[str]:
        self._check_open()
        return self._store.names.document(self.namespace, document)

    def places(self, ids: Sequence[str]) -> list[str | None]:
        self._check_open()
        return self._store.names.documents(self.namespace, id_list(ids))

    def prefetch(self, ids: Iterable[str]) -> Prefetch:
        self._check_open()
        records = self._answering.lookup(self.namespace, id_list(ids)) or []
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
        self._store.pin(self.namespace, id_list(ids))

    def unpin(self, ids: Iterable[str]) -> None:
        """Let the KV of these chunks be evicted again.

        Raises
        ------
        UnknownChunkError
            If an id is unknown; nothing is unpinned then.
        """
        self._check_open()
        self._store.unpin(self.namespace, id_list(ids))

    def contains(self, id: str) -> bool:
        self._check_open()
        return self._store.names.lookup(self.namespace, [id])[0] is not None

    def ids(self) -> list[str]:
        self._check_open()
        return [id for id in self._store.names.ids(self.namespace) if not id.startswith(HEAD_PREFIX)]

    def heads(self) -> list[str]:
        """Return the names under which the KV of prompts' fixed heads (`FixedText`) is kept; `delete` takes them."""
        self._check_open()
        return [id for id in self._store.names.ids(self.namespace) if id.startswith(HEAD_PREFIX)]

    def records(self, ids: Sequence[str]) -> list[NodeRecord | None]:
        self._check_open()
        return self._store.names.lookup(self.namespace, id_list(ids))

    @property
    def revision(self) -> int:
        self._check_open()
        return self._store.names.revision()

    def changes(self, since: int | None = None) -> NameChanges:
        self._check_open()
        changes = self._store.names.changes(self.namespace, since)
        names = [each for each in changes.names if each[1] is None or not each[1].startswith(HEAD_PREFIX)]
        waiting = {id: digest for id, digest in changes.waiting.items() if not id.startswith(HEAD_PREFIX)}
        return replace(changes, names=names, waiting=waiting)

    def prompt_layout(self, prompt: BlendPrompt) -> PromptLayout:
        return self._assemble(prompt).layout

    def owned(self, owner: str, sources: Iterable[str] | None = None) -> list[str]:
        """Return the ids that a vector store has (`Chunk.owner`), or those of them that were made of these sources."""
        self._check_open()
        return self._store.names.owned(self.namespace, owner, sources)

    def note_unfound(self) -> None:
        self.metrics.count_unfound()

    def stored_prefix(self, prompt: BlendPrompt) -> StoredPrefix:
        """Return how much of a prompt another server can take from the store, if it can only go on behind a prefix.

        That is what stands before the first chunk, which is encoded here if it is new, and the chunks up to the first whose KV is
        missing, or behind which text stands that KV does not cover. What is missing is encoded in the background.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.

        Returns
        -------
        StoredPrefix
            Its tokens, and where the KV of the first of them is.

        Raises
        ------
        PromptError
            As for `generate`.
        """
        self._check_open()
        assembled = self._assemble(prompt)
        if self._form is None or not self._form.is_movable:
            reason = self.unsupported_reason or "KV of this model cannot be moved to another position"
            return StoredPrefix(assembled.layout.token_ids, (), self.namespace, reason)
        head = prompt_head(assembled)
        if head:
            self._supply.store_head(head)
        names = {chunk.key: chunk.id for chunk in assembled.chunks if chunk.named and chunk.id is not None}
        held = dict(zip(names, self._store.holds(list(names), durable=True), strict=True))
        missing = [id for key, id in names.items() if not held[key]]
        if missing:
            self._ingest.encode_later(missing)
        return stored_prefix(assembled, self.namespace, lambda keys: self._store.holds(keys, durable=True))

    def whole_documents(self, prompt: BlendPrompt) -> BlendPrompt | None:
        """Return a prompt with whole documents, each in the place of the first of its chunks, instead of the chunks.

        Its full prefill knows all that the chunks of `prompt` remember, so answers from those chunks are compared with it.

        Parameters
        ----------
        prompt : BlendPrompt
            The prompt.

        Returns
        -------
        BlendPrompt or None
            The prompt in token ids; the same tokens if no chunk is a piece of a document, and None if the documents do not
            fit the model's window.
        """
        ids = self._assembler.with_whole_documents(self._assemble(prompt))
        return None if ids is None else BlendPrompt(segments=[ids])

    def _assemble(self, prompt: BlendPrompt, *, retrieving: bool = False) -> AssembledPrompt:
        self._check_open()
        if not isinstance(prompt, BlendPrompt):
            raise ConfigError(
                f"the prompt is a {type(prompt).__name__}; give a BlendPrompt, as in BlendPrompt(text, chunks), or for a "
                "schema's prompt Schemas(engine).prompt(prompt)"
            )
        return self._assembler.assemble(prompt, retrieving=retrieving)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    @abstractmethod
    def for_tenant(self, tenant: str) -> ChunkLibrary:
        """Return the chunks of another tenant in the same store; close them before these."""

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """Write what waits to be written; what was added in the background is encoded before, if `wait`."""

    @abstractmethod
    def _check_model(self) -> None:
        """See that what is encoded from now on is what the keys say."""

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed; make a new one")
